"""Test that libraries which save in the background are measured at their best, and never when they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.async_peers import ASYNC, Background, process_group


def test_a_failed_save_ends_the_benchmark(tmp_path: Path) -> None:
    """Test that a save which fails in the background is not measured as a short one."""

    def begin(_saver: Background, target: Path) -> Callable[[], object]:
        def wait() -> None:
            raise OSError(f"cannot write {target.name}")

        return wait

    saver = Background({}, tmp_path, "failing", begin)
    saver.save(1)
    for then in (saver.drain, saver.finish, lambda: saver.save(2)):
        with pytest.raises(OSError, match="cannot write 1"):
            then()
    assert saver.durable == []


def test_torch_dcp_copies_into_the_same_memory_each_time(tmp_path: Path) -> None:
    """Test also that the memory is freed at the end."""
    model = torch.nn.Linear(8, 8)
    with process_group():
        saver = ASYNC["torch DCP async staged"]({"model": model}, tmp_path)
        assert isinstance(saver, Background)
        used = []
        for step in range(3):
            saver.save(step)
            saver.before_optimizer()
            saver.drain()
            assert saver.stager is not None
            kept = saver.stager._state_dict_stager._cached_storage_mapping
            used.append(kept[model.weight.untyped_storage()].data_ptr())
        saver.finish()
    assert len(set(used)) == 1
    assert len(kept) == 0
    assert len(saver.durable) == 3
