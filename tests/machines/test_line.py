"""The line of training of several stores: ranks as threads compare what each of them knows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from asymcheck import Ranks, Store
from asymcheck.errors import AsymcheckError, RankFailedError, StorageError
from asymcheck.machines import align
from asymcheck.ranks import Session
from asymcheck.ranks.homes import Home
from tests.ranks.launched import CONFIG
from tests.ranks.test_session import each


@pytest.mark.parametrize("broken", [0, 1])
def test_a_store_that_cannot_be_read_ends_the_start_of_all_at_once(tmp_path: Path, broken: int) -> None:
    """And all hear why, instead of waiting for that rank."""
    keys = dist.HashStore()

    def heads(*_words: object, **_more: object) -> None:
        raise StorageError("cannot read its folder: Input/output error")

    def work(rank: int) -> AsymcheckError | None:
        with Store.open(tmp_path / f"machine-{rank}", config=CONFIG) as store:
            home = Home(store.store_id, f"node-{rank}", "boot")
            session = Session.join(Ranks(rank, 2, keys, timeout_s=60.0), "run", {}, home)
            if rank == broken:
                store.heads = heads  # type: ignore[method-assign, assignment]  # a device that fails
            try:
                align(session, store, "run")
            except AsymcheckError as error:
                return error
        return None

    began = time.monotonic()
    errors = each(2, work)
    assert time.monotonic() - began < 30
    assert isinstance(errors[broken], StorageError)
    assert isinstance(errors[1 - broken], RankFailedError)
    assert all("Input/output error" in str(error) for error in errors)
