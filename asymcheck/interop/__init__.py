"""Other formats: safetensors files, Hugging Face folders and torch files, to and from a store, in bounded memory."""
