"""Tests. Folders mirror the package, and `architecture/` tests the rules of the source tree."""
