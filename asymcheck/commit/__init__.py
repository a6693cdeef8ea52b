"""The write path to the drive: encode partitions, build packs, and commit the manifest (SPEC.md §B2)."""
