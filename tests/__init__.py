"""The tests: folders mirror the package; `architecture/` holds the rules that the whole tree keeps."""
