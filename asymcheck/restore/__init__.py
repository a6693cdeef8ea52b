"""Restore: resolve a consistent checkpoint, read its partitions, and assemble the state."""
