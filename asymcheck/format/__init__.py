"""SPEC.md in code: bytes to values and back. Pure: no I/O, no torch, no clock."""
