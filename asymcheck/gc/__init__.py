"""Garbage collection of packs and rings, repacking of packs, and retention (SPEC.md §8.3)."""
