"""Garbage collection of packs and rings, repacking, and retention (SPEC.md §8.3)."""
