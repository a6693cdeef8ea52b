"""Codecs encode plain bytes into a payload and decode them again (SPEC.md §A10). They are pure functions on buffers."""
