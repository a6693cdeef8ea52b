"""Test the text forms of returned objects."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from asymcheck import Store, TensorShard

LINE = 120


def test_a_checkpoint_is_one_short_line(store_path: Path) -> None:
    """Test run, step, generation, save, size, some metrics, and remarks such as "abandoned"."""
    metrics = {"loss": 0.123456789, "accuracy": 0.9, "norm": 2.0, "other": 4.0}
    with Store.open(store_path, create=True) as store:
        found = store.save({"w": torch.ones(1000)}, step=20, metrics=metrics)
    said = f"<Checkpoint 'default' step 20, generation 1, save {found.save_id[:12]}, 3.9 KiB, loss 0.123457, accuracy"
    assert repr(found) == f"{said} 0.9, norm 2, …>"
    plain = dataclasses.replace(found, metrics={})
    assert repr(plain) == f"<Checkpoint 'default' step 20, generation 1, save {found.save_id[:12]}, 3.9 KiB>"
    for changes, words in (
        ({"on_line": False}, "3.9 KiB, abandoned>"),
        ({"on_line": None}, "3.9 KiB, line unknown>"),
        ({"complete": False}, "incomplete or damaged>"),
        ({"world_size": 8}, "8 ranks, 3.9 KiB>"),
    ):
        text = repr(dataclasses.replace(plain, **changes))
        assert text.endswith(f", {words}")
        assert len(text) < LINE


def test_a_shard_has_shape_and_dtype() -> None:
    """Test shape and dtype of the whole tensor, as for a DTensor."""
    shard = TensorShard(torch.zeros(2, 3, dtype=torch.bfloat16), (8, 3), (4, 0))
    assert (shard.shape, shard.dtype) == (torch.Size([8, 3]), torch.bfloat16)
