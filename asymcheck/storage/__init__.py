"""Storage of frames, packs and manifests: shared memory, local drive, remote locations."""
