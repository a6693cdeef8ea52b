"""Create rings that look like rings of a killed process."""

from __future__ import annotations

import os
from pathlib import Path

from asymcheck import Store
from asymcheck.format.layout import parse_checkpoint_name
from asymcheck.types import SaveId
from tests.storage.ring_cases import make_ring, put


def leave_ring(store: Path, folder: Path) -> Path:
    """Create a ring with a durable and an unreadable capture, and return its path."""
    with Store.open(store, read_only=True) as opened:
        store_id = bytes.fromhex(opened.resources.usage().store_id)
    ring = make_ring(folder, ring_id=os.urandom(16), store_id=store_id, store=str(store), run="default")
    checkpoints = (
        sorted((store / "manifests" / "default").iterdir()) if (store / "manifests" / "default").exists() else []
    )
    for checkpoint in checkpoints[:1]:
        ref = parse_checkpoint_name(checkpoint.name)
        (manifest,) = checkpoint.iterdir()
        assert ref is not None
        ring.enter(put(ring, manifest.read_bytes()), ref.save_id)
    ring.enter(put(ring, b"no manifest"), SaveId(os.urandom(16)))
    ring.close(keep=True)
    return ring.path
