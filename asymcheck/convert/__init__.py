"""Import and export of other formats: safetensors, Hugging Face folders, torch files, DCP and DeepSpeed folders."""
