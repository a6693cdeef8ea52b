"""Other programs' formats: safetensors files and the Hugging Face folder layout."""
