"""Codecs by number: payload to plain bytes (SPEC.md §12)."""
