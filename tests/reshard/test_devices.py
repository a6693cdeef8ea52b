"""Test device tensors: shards are gathered in host memory if they cannot be copied in order."""

from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig, TensorShard
from tests.reshard.ranks import cut_in_grid, save_ranks

SMALL = StoreConfig(partition_bytes=4096, bundle_below_bytes=4096, inline_bytes=64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parts_are_read_into_device_memory(tmp_path: Path) -> None:
    """Test shards by rows and by columns, strided and not, new and in place."""
    full = torch.randn(60, 70)
    with Store.open(tmp_path / "store", config=SMALL, create=True) as store:
        save_ranks(store, [{"w": shard} for shard in cut_in_grid(full.cuda(), [[20], [30]])])
        for rows, columns in [
            (slice(10, 50), slice(0, 70)),
            (slice(0, 60), slice(25, 35)),
            (slice(20, 60), slice(0, 9)),
        ]:
            part = full[rows, columns]
            for local in (torch.zeros(part.shape).cuda(), torch.zeros(*part.t().shape).cuda().t()):
                store.load(into={"w": TensorShard(local, (60, 70), (rows.start, columns.start))})
                assert torch.equal(local.cpu(), part)
        found = store.load(device="cuda")
        assert isinstance(found, dict)
        assert found["w"].is_cuda
        assert torch.equal(found["w"].cpu(), full)
