"""Verification and repair of a store, with one frame scanner for verify, repair and catalog rebuild."""
