"""Test device copies: their order, their targets, and failures."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.capture import background_saver
from asymcheck.capture.background_saver import Statistics
from asymcheck.capture.device_copy import Devices, EagerCopies, Transfers
from asymcheck.capture.engine import CaptureEngine
from asymcheck.capture.inflight import Capture
from asymcheck.capture.ring_flush import RingFlusher
from asymcheck.capture.schedule import CaptureSchedule
from asymcheck.capture.tear_detection import SourceDigests, TearDetector
from asymcheck.config import MIB, CaptureConfig
from asymcheck.errors import CaptureWarning, LostCheckpointWarning, StorageError
from asymcheck.state.leaves import Leaf, make_leaf
from asymcheck.state.partition_plan import Partition, Piece
from asymcheck.storage.gpu_staging import Mark, Staging
from asymcheck.storage.nvme import ManifestFiles
from tests.capture.simulated_device import SimulatedDevice, SimulatedMark
from tests.checkpointer.loops import copy_late


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Return a device without delays."""
    device = SimulatedDevice(0, 0)
    yield device
    device.close()


def _leaves(device: SimulatedDevice, *tensors: torch.Tensor) -> list[Leaf]:
    device.own(*tensors)
    return [make_leaf(tensor, f"t{number}", "") for number, tensor in enumerate(tensors)]


def _whole(leaves: list[Leaf], *rows: int) -> Partition:
    return Partition(tuple(Piece(row, 0, leaves[row].nbytes) for row in rows))


def test_the_device_waits_for_the_copies_that_both_threads_have_queued(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test also a thread that queued the first copy and reads the last mark."""
    first, second = torch.zeros(10), torch.zeros(10)
    leaves = _leaves(device, first, second)
    transfers = Transfers(Devices(0, device.link_of), leaves, [_whole(leaves, 0), _whole(leaves, 1)])
    transfers.begin()
    whole, may_copy, may_return = device.queue, threading.Event(), threading.Event()

    def queue(work: Callable[[], None], after: Mark) -> Mark:
        is_first = threading.current_thread() is other

        def late() -> None:
            may_copy.wait()
            # Wait long enough for a training that would not wait for the second copy.
            time.sleep(0 if is_first else 0.2)
            work()

        mark = whole(late, after)
        if is_first:
            queued.set()
            may_return.wait()
        return mark

    queued, payloads = threading.Event(), [bytearray(40), bytearray(40)]
    other = threading.Thread(target=transfers.copy, args=(0, memoryview(payloads[0])))
    monkeypatch.setattr(device, "queue", queue)
    other.start()
    queued.wait()
    transfers.copy(1, memoryview(payloads[1]))
    may_return.set()
    other.join()
    transfers.hold()
    device.run(lambda: [tensor.fill_(1) for tensor in (first, second)] and None)
    may_copy.set()
    for number in range(2):
        transfers.wait(number)
    assert payloads == [bytes(40), bytes(40)], "the training went on before its tensors had been copied"


def test_many_tensors_come_in_one_copy(device: SimulatedDevice) -> None:
    """Test one copy if the buffer has space, and several otherwise; every byte is at its position."""
    tensors = [torch.arange(3 + number) for number in range(50)] + [torch.zeros(0)]
    leaves = _leaves(device, *tensors)
    wanted = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    for staging_bytes in (8 * MIB, 0):
        devices = Devices(staging_bytes, device.link_of)
        transfers = Transfers(devices, leaves, [_whole(leaves, *range(len(tensors)))])
        transfers.begin()
        payload = bytearray(len(wanted))
        transfers.copy(0, memoryview(payload))
        assert transfers.is_staged(0) == bool(staging_bytes)
        transfers.hold()
        transfers.wait(0)
        assert payload == wanted
        assert transfers.devices[0].staging._allocator.free_bytes == max(staging_bytes - MIB, 0)


def test_a_clone_for_which_the_device_has_no_memory_is_none(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the tensor is copied synchronously, and that the buffer is unchanged."""
    leaves = _leaves(device, torch.ones(1000))
    transfers = Transfers(Devices(8 * MIB, device.link_of), leaves, [_whole(leaves, 0)])

    def refuse(_work: Callable[[], None]) -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(device, "run", refuse)
        assert not transfers.stage(0)
    assert transfers.devices[0].staging._allocator.free_bytes == 7 * MIB
    assert transfers.stage(0)


def test_nothing_is_fetched_of_a_tensor_without_elements(device: SimulatedDevice) -> None:
    """Test a device from which nothing else is fetched."""
    leaves = _leaves(device, torch.zeros(0))
    transfers = Transfers(Devices(MIB, device.link_of), leaves, [])
    asides, given = EagerCopies(transfers, leaves), []
    asides.want_whole([0], lambda _row, data: given.append(data))
    asides.gather()
    transfers.begin()
    asides.fetch(lambda length: memoryview(bytearray(length)))
    asides.settle()
    assert given == [b""]


def test_device_wait_is_measured_later(device: SimulatedDevice) -> None:
    """Test that the host asks for the wait later, and that each wait counts once."""
    leaves = _leaves(device, torch.zeros(10))
    devices = Devices(0, device.link_of)
    transfers = Transfers(devices, leaves, [_whole(leaves, 0)])
    transfers.begin()
    may_copy, may_go_on = threading.Event(), SimulatedMark()
    device.queue(may_copy.wait, transfers.devices[0].link.mark())
    transfers.copy(0, memoryview(bytearray(40)))
    transfers.hold()
    assert devices.held_s() == 0
    # The device is a thread, which may begin to wait some time after the request.
    devices.holds[0][0].wait()
    time.sleep(0.05)
    may_copy.set()
    device.run(may_go_on.event.set)
    may_go_on.wait()
    assert 0.05 <= devices.held_s() < 30
    assert devices.held_s() == 0


def _train(
    path: Path,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    ring_bytes: int | None = None,
) -> Statistics:
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    weight = torch.nn.Parameter(torch.zeros(700_000))
    device.own(weight)
    optimizer = torch.optim.SGD([weight], foreach=False)
    state = {"weight": weight, "optimizer": optimizer}
    with (
        asymcheck.Store.open(path, create=True) as store,
        asymcheck.Checkpointer(
            store, state, capture=CaptureConfig(ring_bytes=ring_bytes), on_error="warn", every=1, keep=None
        ) as checkpointer,
    ):
        for step in range(steps):
            weight.grad = torch.ones_like(weight)
            checkpointer.fence()
            device.catch_up()
            optimizer.step()
            checkpointer.step(step)
        checkpointer.wait()
        return checkpointer.statistics()


def _delay_digests(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> list[bool]:
    """Let source digests begin after all copies; call ``then`` first. Return whether all was copied, by capture."""
    begin = TearDetector.begin
    copied: list[bool] = []

    def late(self: TearDetector, source_digests: SourceDigests, *rest: object) -> None:
        ends, count = source_digests._transfers._ends, len(source_digests.partitions)
        deadline = time.monotonic() + 30
        while not (is_copied := len(ends) == count) and time.monotonic() < deadline:
            time.sleep(0.001)
        copied.append(is_copied)
        # Long enough for a capture thread that would not wait for the digests.
        time.sleep(0.05)
        then()
        begin(self, source_digests, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(TearDetector, "begin", late)
    return copied


def test_device_copies_begin_before_the_source_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice
) -> None:
    """Test that all copies are queued before the digests, and that the copied bytes are compared with them later."""
    compared: list[int] = []
    check = SourceDigests.check

    def counted(self: SourceDigests, number: int, payload: memoryview) -> None:
        compared.append(number)
        check(self, number, payload)

    monkeypatch.setattr(SourceDigests, "check", counted)
    copied = _delay_digests(monkeypatch, lambda: None)
    _train(tmp_path, device, monkeypatch, 2)
    assert copied == [True, True]
    # The first captures compare all bytes.
    assert compared == [0, 0]
    with asymcheck.Store.open(tmp_path) as store:
        for step in range(2):
            assert torch.equal(store.load(step=step)["weight"], torch.full((700_000,), -1e-3).mul_(step + 1))


def test_a_capture_that_fails_after_early_copies_is_lost_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice
) -> None:
    """Test a failure of the source digests in the second capture; earlier and later captures become durable."""
    calls, finished = itertools.count(), []
    finish = RingFlusher.finished

    def fail_second() -> None:
        if next(calls) == 1:
            raise StorageError("no digest")

    def counted(self: RingFlusher, capture: Capture) -> None:
        finished.append(capture.request.step)
        finish(self, capture)

    monkeypatch.setattr(RingFlusher, "finished", counted)
    _delay_digests(monkeypatch, fail_second)
    with pytest.warns(LostCheckpointWarning, match="no digest"):
        _train(tmp_path, device, monkeypatch, 4)
    assert finished == [0, 1, 2, 3]
    with asymcheck.Store.open(tmp_path) as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0, 2, 3]


def test_asides_do_not_wait_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice) -> None:
    """Test a ring that is full before the first capture is complete, whose end is queued behind early copies."""
    set_aside, digest = CaptureEngine._set_aside, CaptureEngine._digest
    is_begun, is_full = threading.Event(), threading.Event()

    def set_aside_late(self: CaptureEngine, capture: Capture, deferred: list[int]) -> None:
        # A wait that would never end loses the capture.
        end = threading.Timer(20, self._fail, (capture, StorageError("no space")))
        if capture.request.step == 1:
            # The asides of the first capture have left the ring.
            assert is_begun.wait(30)
            while self.ring.take(1) is not None:
                pass
            is_full.set()
            end.start()
        set_aside(self, capture, deferred)
        end.cancel()

    def digest_late(self: CaptureEngine, capture: Capture, number: int) -> None:
        assert number == 0 or is_full.wait(30)
        digest(self, capture, number)
        is_begun.set()

    monkeypatch.setattr(CaptureEngine, "_set_aside", set_aside_late)
    monkeypatch.setattr(CaptureEngine, "_digest", digest_late)
    # Twice the state, without the headers of the frames.
    assert _train(tmp_path, device, monkeypatch, 2, 2 * 2_800_000).durable == 2


@pytest.mark.slow
def test_unversioned_change_on_a_device_is_found_in_the_first_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice
) -> None:
    """Test a change of one element through ``.data``; later captures clone the tensor inside ``step()``."""
    copy_late(monkeypatch)
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    weight = torch.nn.Parameter(torch.zeros(700_000))
    device.own(weight)
    optimizer = torch.optim.SGD([weight], foreach=False)
    weight.grad = torch.ones_like(weight)
    expected = {}
    state = {"weight": weight, "optimizer": optimizer}
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        warnings.catch_warnings(record=True, action="always") as caught,
        asymcheck.Checkpointer(store, state, on_error="warn", every=1, keep=None) as checkpointer,
    ):
        for step in range(4):
            device.catch_up()
            optimizer.step()
            checkpointer.step(step)
            expected[step] = weight.detach().clone()
            device.run(lambda: weight.data[123_456].add_(1))
            checkpointer.wait()
        # On a busy machine, a capture may be copied before the change. It is correct, and only the fence finds the
        # change.
        assert {one.category for one in caught} <= {LostCheckpointWarning, CaptureWarning}
        assert all("tensor weight changed" in str(one.message) for one in caught)
        told = [str(one.message) for one in caught if one.category is LostCheckpointWarning]
        assert len(told) <= 1
        kept = [step for step in range(4) if not any(f"step {step} of" in one for one in told)]
        assert [checkpoint.step for checkpoint in store.checkpoints()] == kept
        for step in kept:
            assert torch.equal(store.load(step=step)["weight"], expected[step])


@pytest.mark.slow(quick=["sampled-3145728"])
@pytest.mark.parametrize("ring_bytes", [None, 3 * MIB])
@pytest.mark.parametrize("proof", ["off", "sampled"])
def test_asides_are_read_in_their_original_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, proof: str, ring_bytes: int | None
) -> None:
    """Test small tensors on the device and large ones in host memory, which the other thread completes meanwhile."""
    whole = device.queue

    def slowly(work: Callable[[], None], after: Mark) -> Mark:
        # Calls of CUDA take time, too.
        time.sleep(0.002 if threading.current_thread() is threading.main_thread() else 0)
        return whole(work, after)

    monkeypatch.setattr(device, "queue", slowly)
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    scales, on_host = torch.zeros(30, 60), [torch.zeros(1 << 18) for _ in range(4)]
    device.own(scales)
    capture = CaptureConfig(proof=proof, ring_bytes=ring_bytes)  # type: ignore[arg-type]  # one of the literals
    state = {"scales": list(scales.unbind(0)), "on_host": on_host}
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        warnings.catch_warnings(action="ignore", category=CaptureWarning),
        asymcheck.Checkpointer(store, state, capture=capture, every=1, keep=None) as checkpointer,
    ):
        for step in range(10):
            checkpointer.fence()
            device.catch_up()
            for tensor in (scales, *on_host):
                tensor.fill_(step + 1)
            checkpointer.step(step)
        checkpointer.wait()
        for step in range(10):
            loaded = store.load(step=step)
            assert torch.stack(loaded["scales"]).eq(step + 1).all(), f"step {step}"
            assert all(tensor.eq(step + 1).all() for tensor in loaded["on_host"])


def test_a_staging_buffer_for_which_the_device_has_no_memory_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test every error class of torch: nothing can be cloned into the buffer."""
    empty = torch.empty

    def refuse(size: int, **options: object) -> torch.Tensor:
        if size:
            raise torch.cuda.OutOfMemoryError
        return empty(size, **options)  # type: ignore[call-overload,no-any-return]  # as they were given

    monkeypatch.setattr(torch, "empty", refuse)
    staging = Staging(torch.device("cpu"), 1 << 20)
    assert (staging._allocator.free_bytes, staging.take(1)) == (0, None)


def test_a_place_is_not_free_while_part_of_a_copy_that_failed_may_still_come(device: SimulatedDevice) -> None:
    """Test a device that accepted the first piece of a copy before it refused the second."""
    leaves = _leaves(device, torch.ones(10), torch.ones(10))
    transfers = Transfers(Devices(0, device.link_of), leaves, [_whole(leaves, 0, 1)])
    transfers.begin()
    may_copy = threading.Event()
    whole, payload = device.queue, bytearray(80)

    def first_piece() -> None:
        may_copy.wait()
        leaves[0].copy_bytes(0, memoryview(payload)[:40])

    def refuse(work: Callable[[], None], after: Mark) -> Mark:
        device.queue = whole  # type: ignore[method-assign]  # the next one is as ever
        device.queue(first_piece, after)
        raise torch.cuda.OutOfMemoryError

    device.queue = refuse  # type: ignore[method-assign]  # for once
    with pytest.raises(torch.cuda.OutOfMemoryError):
        transfers.copy(0, memoryview(payload))
    assert not transfers.have_passed(0)
    may_copy.set()
    transfers.wait(0)
    assert payload[:40] == torch.ones(10).numpy().tobytes()


def test_device_failure_loses_captures_without_a_hang(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a CUDA error, and a graph recording, are raised at the next query of a mark."""

    def fail(_mark: SimulatedMark) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(SimulatedMark, "passed", fail)
    monkeypatch.setattr(SimulatedMark, "wait", fail)
    monkeypatch.setattr(Devices, "held_s", lambda _devices: 0.0)
    # The simulated queues also wait for marks, and would continue after the state is gone.
    monkeypatch.setattr(device, "run", lambda work: work())
    monkeypatch.setattr(device, "queue", lambda work, _after: (work(), SimulatedMark())[1])
    monkeypatch.setattr(device, "hold", lambda _until: None)
    monkeypatch.setattr(device, "catch_up", lambda: None)
    with pytest.warns(LostCheckpointWarning, match="illegal memory access"):
        statistics = _train(tmp_path, device, monkeypatch, 3)
    assert (statistics.captures, statistics.durable, statistics.lost) == (3, 0, 3)


def test_captures_in_memory_become_durable_after_a_device_failure(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that ``close()`` waits for a commit, although the device refuses all operations."""
    may_publish, publish = threading.Event(), ManifestFiles.publish

    def publish_late(*arguments: object) -> object:
        assert may_publish.wait(30)
        return publish(*arguments)  # type: ignore[arg-type]  # passed on

    def fail(*_arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ManifestFiles, "publish", publish_late)
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    weight = torch.nn.Parameter(torch.zeros(700_000))
    device.own(weight)
    state = {"weight": weight, "optimizer": torch.optim.SGD([weight], foreach=False)}
    with asymcheck.Store.open(tmp_path, create=True) as store:
        checkpointer = asymcheck.Checkpointer(store, state, every=1, keep=None)
        checkpointer.step(0)
        assert checkpointer._background is not None
        (capture,) = checkpointer._background._captures
        assert capture.complete.wait(30)
        with monkeypatch.context() as failing:
            for method in ("mark", "queue", "run", "hold"):
                failing.setattr(device, method, fail)
            threading.Timer(0.2, may_publish.set).start()
            checkpointer.close()
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [0]


def test_a_ring_that_cannot_be_pinned_is_not_tried_again(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the ring is used without pinning."""
    asked: list[int] = []
    monkeypatch.setattr(device, "pin", lambda memory: bool(asked.append(len(memory))))
    assert _train(tmp_path, device, monkeypatch, 3).durable == 3
    assert len(asked) == 1


@pytest.mark.slow
def test_nothing_is_asked_of_a_device_while_a_graph_is_recorded(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that no window begins, because a query would become a part of the graph; the fence copies the rest."""
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(3)))
    device.own(*model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=False)
    wanted, asked, mark = [], [], device.mark
    state = {"model": model, "optimizer": optimizer}
    # Otherwise, all partitions would be released before the first window, after fences that waited.
    monkeypatch.setattr(
        CaptureSchedule, "_lead", property(lambda _timing: 0, lambda _timing, _lead: None), raising=False
    )
    config = asymcheck.StoreConfig(deferred_bytes_min=4096, deferred_bytes_max=128 << 10)
    with (
        asymcheck.Store.open(tmp_path, config=config, create=True) as store,
        asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        for step in range(12):
            with monkeypatch.context() as recording:
                # Once while windows are measured, and then when windows release partitions.
                if step == 1 or step > 8:
                    recording.setattr(device, "is_recorded", lambda: True)
                    recording.setattr(device, "mark", lambda: asked.append("a mark") or mark())
                model(torch.ones(1, 600)).sum().backward()
            checkpointer.fence()
            device.catch_up()
            optimizer.step()
            checkpointer.step(step)
            wanted.append(model[0].weight.detach().clone())
        checkpointer.wait()
        assert asked == []
        found = [store.load(step=step)["model"]["0.weight"] for step in range(12)]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_an_optimizer_step_may_be_recorded_after_a_wait(
    tmp_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the fence neither sets nor queries a mark during the recording, and measures the wait afterwards."""
    monkeypatch.setattr(background_saver, "Devices", lambda size: Devices(size, device.link_of))
    weight = torch.nn.Parameter(torch.zeros(700_000))
    device.own(weight)
    optimizer = torch.optim.SGD([weight], foreach=False)
    state = {"weight": weight, "optimizer": optimizer}
    asked, mark, passed = [], device.mark, SimulatedMark.passed
    with (
        asymcheck.Store.open(tmp_path, create=True) as store,
        asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer,
    ):
        checkpointer.step(0)
        checkpointer.wait()
        assert checkpointer._background is not None
        holds = checkpointer._background._devices.holds
        assert len(holds) == 1
        with monkeypatch.context() as recording:
            recording.setattr(device, "is_recorded", lambda: True)
            recording.setattr(device, "mark", lambda: asked.append("mark") or mark())
            recording.setattr(SimulatedMark, "passed", lambda self: asked.append("query") or passed(self))
            optimizer.step()
        assert asked == []
        device.catch_up()
        checkpointer.fence()
        assert not holds
