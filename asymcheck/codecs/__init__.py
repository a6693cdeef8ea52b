"""Codecs encode plain bytes into a payload and decode them again (SPEC.md §12). They are pure functions on buffers."""
