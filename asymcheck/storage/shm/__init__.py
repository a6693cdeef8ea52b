"""DRAM ring: a file in shared memory with captured frames, which survives its process (SPEC.md §B8)."""
