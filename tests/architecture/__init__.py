"""Rules about the source: imports, module contents, and errors."""
