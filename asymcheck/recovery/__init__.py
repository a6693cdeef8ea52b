"""The way up: resolve the newest consistent checkpoint, fetch its partitions, assemble the state.

Rebuild the catalog.
"""
