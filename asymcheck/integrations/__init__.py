"""Other formats and other loops, each optional: files of safetensors, torch and DCP; trainers of other libraries.

Nothing here is imported with the package: a library is needed by those who use it.
"""
