"""Garbage collection of packs and rings, repacking of packs, and retention (SPEC.md §B5)."""
