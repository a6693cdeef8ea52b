"""Tests of the store under chosen interleavings of the file operations of several processes."""
