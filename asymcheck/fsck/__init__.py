"""Verification and repair of a store: one frame scanner, read-only checks, repair, and the catalog's rebuild."""
