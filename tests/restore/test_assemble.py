"""Test assembly of tensors from byte ranges in any order and from any thread."""

import itertools
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.format.manifest import TensorRow
from asymcheck.restore import assemble
from asymcheck.restore.assemble import Assembly, Target
from asymcheck.restore.read_plan import Demand
from tests.store.equality import tensor_bytes

CPU = torch.device("cpu")


def _row(tensor: torch.Tensor) -> TensorRow:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size()
    return TensorRow("x", (), dtype, "other", shape, shape, (0,) * len(shape), size, None, ())


def _ranges(size: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    ends = sorted({0, size, *(cut % size for cut in cuts)})
    return list(itertools.pairwise(ends))


TARGETS = {
    "new": list,
    "contiguous": lambda: [torch.zeros(12, 25, dtype=torch.int32)],
    "strided": lambda: [torch.zeros(25, 12, dtype=torch.int32).t()],
    "several": lambda: [torch.zeros(12, 50, dtype=torch.int32)[:, ::2], torch.zeros(12, 25, dtype=torch.int32)],
}


@pytest.mark.slow(quick=["contiguous"])
@pytest.mark.parametrize("name", TARGETS)
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=12), seed=st.randoms(use_true_random=False))
def test_ranges_may_come_in_any_order(name: str, cuts: list[int], seed: st.DataObject) -> None:
    """Test ranges that split elements, and several target tensors."""
    source = torch.randint(-1000, 1000, (12, 25), dtype=torch.int32)
    plain = tensor_bytes(source)
    existing = TARGETS[name]()
    target = Target(_row(source), existing, CPU)
    ranges = _ranges(len(plain), cuts)
    seed.shuffle(ranges)  # type: ignore[attr-defined]  # a random.Random
    for start, end in ranges:
        target.put(start, memoryview(plain)[start:end])
    for tensor in [target.tensor, *existing]:
        assert torch.equal(tensor, source)
    assert target.in_place == bool(existing)
    assert target.touched


@pytest.mark.parametrize("name", TARGETS)
def test_ranges_may_come_from_many_threads(name: str) -> None:
    """Test that the thread with the last range fills a strided tensor."""
    source = torch.randint(-1000, 1000, (12, 25), dtype=torch.int32)
    plain = tensor_bytes(source)
    for _ in range(20):
        existing = TARGETS[name]()
        target = Target(_row(source), existing, CPU)
        start = threading.Barrier(12)

        def put(number: int, target: Target = target, start: threading.Barrier = start) -> None:
            start.wait(60)
            target.put(number * 100, memoryview(plain)[number * 100 : number * 100 + 100])

        threads = [threading.Thread(target=put, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tensor in [target.tensor, *existing]:
            assert torch.equal(tensor, source)


def test_a_target_that_was_not_written_says_so() -> None:
    """Test that overwritten targets can be listed after a failure."""
    target = Target(_row(torch.zeros(3)), [torch.ones(3)], CPU)
    assert target.in_place
    assert not target.touched
    target.put(0, memoryview(bytes(4)))
    assert target.touched


def test_strided_target_is_written_once() -> None:
    """Test that the tensor is written after all its bytes have arrived."""
    existing = torch.ones(4, 6).t()
    source = torch.zeros(6, 4)
    target = Target(_row(source), [existing], CPU)
    target.put(0, memoryview(bytes(95)))
    assert existing.sum() == 24
    target.put(95, memoryview(bytes(1)))
    assert existing.sum() == 0


def test_device_catches_up_after_a_strided_target_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that streams of other threads may read the tensor. The device is simulated."""
    existing = torch.ones(4, 6).t()
    filled: list[bool] = []
    monkeypatch.setattr(assemble, "catch_up", lambda _devices: filled.append(not existing.any()))
    Target(_row(torch.zeros(6, 4)), [existing], CPU).put(0, memoryview(bytes(96)))
    assert filled == [True]


@pytest.mark.parametrize("exists", [False, True])
def test_device_catches_up_before_it_is_filled(monkeypatch: pytest.MonkeyPatch, *, exists: bool) -> None:
    """Test also new tensors, whose memory may still be read. The device is simulated."""
    asked: list[torch.device] = []
    monkeypatch.setattr(assemble, "catch_up", asked.extend)
    source, meta = torch.ones(4), torch.device("meta")
    existing = [source.to(meta)] if exists else []
    Assembly([Demand(_row(source), [], existing)], CPU if exists else meta)
    assert asked == [meta]
