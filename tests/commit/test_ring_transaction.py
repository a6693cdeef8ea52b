"""Test ring transactions: partitions reused from the store, and errors if they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.commit.save_request import new_save_id
from asymcheck.commit.transaction import RingTransaction
from asymcheck.errors import (
    AsymcheckError,
    LockTimeoutError,
    MissingPartitionError,
    TooManyFilesError,
    TruncatedError,
    UnsupportedFeatureError,
)
from asymcheck.storage.nvme import NvmeTier
from asymcheck.types import Digest, PackId


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TooManyFilesError, TooManyFilesError),
        (LockTimeoutError, LockTimeoutError),
        (UnsupportedFeatureError, UnsupportedFeatureError),
        (TruncatedError, MissingPartitionError),
        (MissingPartitionError, MissingPartitionError),
    ],
)
def test_a_partition_in_a_pack_that_cannot_be_read_now_is_not_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[AsymcheckError], told: type[AsymcheckError]
) -> None:
    """Test that the recovery of a ring discards only captures whose partitions no pack has."""

    def refuse(_tier: NvmeTier, pack_id: PackId, *, wait: bool = True) -> object:
        raise error(f"pack {pack_id.hex()} cannot be opened ({wait})")

    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"w": torch.rand(100_000)}, step=0)
        (tensor,) = store.tensors()[1]
        name = Digest(bytes.fromhex(tensor.partitions[0].digest))
        transactions = [
            RingTransaction(
                store.resources.nvme,
                store.resources.catalog(),
                store.resources.encoder,
                new_save_id(),
                0,
            )
            for _ in range(2)
        ]
        transactions[0].reuse(name, tensor.partitions[0].length)
        monkeypatch.setattr(NvmeTier, "open_pack", refuse)
        # The index of a changed pack is read again.
        for pack in store.resources.nvme.packs.iterdir():
            pack.touch()
        with pytest.raises(told):
            transactions[1].reuse(name, tensor.partitions[0].length)
        for transaction in transactions:
            transaction.abort()
