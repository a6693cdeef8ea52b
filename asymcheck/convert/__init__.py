"""Import and export of foreign formats: safetensors, Hugging Face folders, torch files, DCP and DeepSpeed folders."""
