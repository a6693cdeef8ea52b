"""Codecs by number: plain bytes to payload and back (SPEC.md §12). Pure functions on buffers."""
