"""Tests. Folders mirror the package, and `architecture/` holds the rules of the source tree."""
