"""The way up: resolve the newest consistent checkpoint, fetch its partitions, assemble the state.

Rebuilding the catalog from the packs is here too.
"""
