"""Test releases: what a subscriber gets, what it reads, and what it refuses."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import asymcheck
from asymcheck import Checkpointer, Grace, Publish, Publisher, Store, Subscriber
from asymcheck.cli import exit_status
from asymcheck.cli.main import commands
from asymcheck.config import Compression, StoreConfig
from asymcheck.errors import (
    InconsistentCheckpointError,
    InvalidInputError,
    LostCheckpointWarning,
    NotFoundError,
    OutOfSpaceError,
    Preempted,
    PruneWarning,
    PublishError,
    RemoteUnreachableError,
    SkippedCheckpointWarning,
    StateMismatchError,
    StorageError,
)
from asymcheck.format.layout import ManifestName
from asymcheck.publish import weights
from asymcheck.publish.release import Release, training_step
from asymcheck.publish.snapshot import Snapshot
from asymcheck.storage.manifests import ManifestReader
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.remote.manifests import RemoteManifests
from asymcheck.types import CheckpointRef
from tests.checkpointer.disks import SmallDrive
from tests.damage.flips import flip
from tests.publish.models import check, model, train_to
from tests.reshard.ranks import as_rank


def publish(publisher: Publisher, trained: torch.nn.Module, step: int) -> Release:
    """Publish a model after a step."""
    train_to(trained, step)
    return publisher.publish({"model": trained, "optimizer": {"lr": 0.1}}, step)


def damage_release(location: Path, number: int) -> None:
    """Flip a byte in every pack that only the release ``number`` needs."""
    with Store.open(location, read_only=True) as store:
        manifests = store.resources.tier.manifests
        packs = {
            listing.ref.step: set(manifests.read_all(listing)[0].header.packs)
            for listing in manifests.checkpoints("release")
        }
    own = packs[number].difference(*(others for other, others in packs.items() if other != number))
    for pack in own:
        (path,) = (location / "packs").glob(f"*{pack.hex()}*")
        flip(path, 8 * (4096 + 4200))


def test_failed_collection_at_a_remote_location_is_reported(tmp_path: Path) -> None:
    """Test that packs of old releases do not collect there without a warning."""
    releases, trained = tmp_path / "releases", model()
    with Store.open(tmp_path / "store", create=True) as store:
        with Publisher(Publish(releases.as_uri(), keep=1), store) as publisher:
            publish(publisher, trained, 1)
        (manifest,) = releases.rglob("*.manifest")
        damaged = releases / "manifests" / "other" / manifest.parent.name / manifest.name
        damaged.parent.mkdir(parents=True)
        damaged.write_bytes(b"x")
        with (
            Publisher(Publish(releases.as_uri(), keep=1), store) as publisher,
            pytest.warns(PruneWarning, match="nothing was removed from"),
        ):
            assert publish(publisher, trained, 2).number == 2


def test_a_location_that_was_emptied_is_only_created_again_on_request(tmp_path: Path) -> None:
    """Test that a location whose file system is not mounted gets no releases."""
    releases, trained = tmp_path / "releases", model()
    rules = Publish(releases.as_uri())
    with Store.open(tmp_path / "store", create=True) as store:
        with Publisher(rules, store) as publisher:
            publish(publisher, trained, 1)
        shutil.rmtree(releases)
        with Publisher(rules, store) as publisher, pytest.raises(RemoteUnreachableError, match="--create"):
            publish(publisher, trained, 2)
        assert not releases.exists()
        store.save({"model": trained}, step=3)
    command = ["publish", str(tmp_path / "store"), "--to", rules.location]
    refused = CliRunner().invoke(commands, command)
    assert (refused.exit_code, "--create" in refused.output) == (exit_status.STORAGE, True)
    assert CliRunner().invoke(commands, [*command, "--create"]).exit_code == 0
    with Store.open(rules.location) as created:
        assert [release.step for release in created.checkpoints("release")] == [2]


def test_a_release_reads_only_manifests_of_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the cost of a release does not grow with the checkpoints of the training in the same store."""
    read: list[str] = []
    original = ManifestReader.read_bytes

    def read_bytes(manifests: ManifestReader, run: str, ref: CheckpointRef, name: ManifestName) -> bytes:
        read.append(run)
        return original(manifests, run, ref, name)

    trained = model()
    with (
        Store.open(tmp_path / "store", create=True) as store,
        Publisher(Publish(f"file://{tmp_path}/releases", keep=1), store) as publisher,
    ):
        for step in range(3):
            store.save({"w": torch.full((9,), step)}, step=step)
        publish(publisher, trained, 1)
        monkeypatch.setattr(ManifestReader, "read_bytes", read_bytes)
        publish(publisher, trained, 2)
        assert set(read) == {"release"}
        assert [release.step for release in store.checkpoints("release")] == [2]


def test_an_outage_of_the_location_does_not_read_the_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that an attempt of a new publisher, as after each failure, ends before it reads the newest release."""
    rules, trained = Publish(f"file://{tmp_path}/releases"), model()
    with Store.open(tmp_path / "store", create=True) as store:
        with Publisher(rules, store) as publisher:
            publish(publisher, trained, 1)

        def checkpoints(_manifests: RemoteManifests, _run: str) -> object:
            raise RemoteUnreachableError("no answer")

        monkeypatch.setattr(RemoteManifests, "checkpoints", checkpoints)
        monkeypatch.setattr(Store, "load", None)
        with Publisher(rules, store) as publisher, pytest.raises(RemoteUnreachableError, match="no answer"):
            publish(publisher, trained, 2)
        monkeypatch.undo()
        with Publisher(rules, store) as publisher:
            assert publish(publisher, trained, 3).deltas == 1


def test_a_drive_does_not_stay_full_of_the_packs_of_a_failed_release(store_path: Path, tmp_path: Path) -> None:
    """Test that a release follows another one that failed at its last file."""
    weights = torch.randn(150_000)
    with (
        Store(NvmeTier(store_path, StoreConfig(slots=1), files=SmallDrive())) as store,
        Publisher(Publish(f"file://{tmp_path}/releases", keep=1, full_every=1, compression="off"), store) as publisher,
    ):
        publisher.publish({"model": {"w": weights}}, 0)
        with pytest.raises(OutOfSpaceError, match="no space for"):
            publisher.publish({"model": {"w": weights.roll(1)}}, 1)
        assert publisher.publish({"model": {"w": weights.roll(2)}}, 2).number == 2


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_subscriber_follows_releases_and_reads_only_differences(tmp_path: Path, scheme: str) -> None:
    """Test a model in bfloat16 after each of several releases, at a local and at a remote location."""
    location, trained, served = f"{scheme}{tmp_path}/releases", model(), model(torch.bfloat16)
    with (
        Store.open(tmp_path / "store", create=True) as store,
        Publisher(Publish(location, dtype=torch.bfloat16, full_every=4), store) as publisher,
        Subscriber(location, served) as subscriber,
    ):
        full = 0
        assert subscriber.poll() is None
        assert subscriber.update() is None
        for number in range(1, 7):
            release = publish(publisher, trained, 10 * number)
            assert (release.number, release.deltas) == (number, (number - 1) % 4)
            assert subscriber.wait(0)
            update = subscriber.update()
            assert update is not None
            assert (update.number, update.step, update.is_buffered) == (number, 10 * number, True)
            check(served, 10 * number)
            assert served.tied.weight is served[0].weight
            full = release.written_bytes if not release.deltas else full
            if release.deltas:
                assert release.written_bytes < full / 2
                assert update.fetched_bytes < full / 2
        assert subscriber.update() is None
    with Store.open(location, read_only=True) as opened:
        assert opened.verify() == []
        assert [row.step for row in opened.checkpoints("release")] == [4, 5, 6]


@pytest.mark.parametrize("buffering", ["double", "single"])
def test_unchanged_tensors_are_neither_stored_nor_fetched(tmp_path: Path, buffering: str) -> None:
    """Test a release in which one of two large tensors is as before."""
    state = {"model": {"a": torch.rand(2_000_000), "b": torch.rand(100_000)}}
    served = {"a": torch.zeros(2_000_000), "b": torch.zeros(100_000)}
    with (
        Publisher(Publish(str(tmp_path / "releases"))) as publisher,
        Subscriber(str(tmp_path / "releases"), served, buffering=buffering) as subscriber,  # type: ignore[arg-type]  # one of two words
    ):
        publisher.publish(state, 1)
        subscriber.update()
        address = served["a"].data_ptr()
        state["model"]["b"] += 1
        assert publisher.publish(state, 2).written_bytes < 500_000
        update = subscriber.update()
        assert update is not None
        is_kept = served["a"].data_ptr() == address
        served["a"].mul_(0)  # by the consumer
        publisher.publish(state, 3)
        assert subscriber.update() is not None
    assert torch.equal(served["a"], state["model"]["a"])
    assert (update.changed_tensors, is_kept) == (1, True)
    assert update.fetched_bytes < 500_000
    assert torch.equal(served["b"], state["model"]["b"])


def test_restarted_publisher_and_absent_subscriber_continue(tmp_path: Path) -> None:
    """Test that numbers increase, that differences go on, and that a subscriber catches up in one update."""
    rules, trained, served = Publish(str(tmp_path / "releases"), keep=2), model(), model()
    with Subscriber(rules.location, served) as subscriber:
        for number in range(1, 6):
            with Publisher(rules) as publisher:
                release = publish(publisher, trained, number)
            assert (release.number, release.deltas) == (number, number - 1)
            if number == 1:
                subscriber.update()
        update = subscriber.update()
    assert update is not None
    assert update.number == 5
    check(served, 5)


def test_weights_of_a_store_are_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the command publishes the tensors that it has read, and reads no earlier release for a full one."""
    trained = model()
    with Store.open(tmp_path / "store", create=True) as store:
        for step in (1, 2):
            train_to(trained, step)
            store.save({"model": trained}, step=step)
    taken, take, load = [], Snapshot.take, Store.load

    def noted(snapshot: Snapshot, state: dict[str, dict[str, torch.Tensor]], *, copies: bool = True) -> object:
        selected = take(snapshot, state, copies=copies)
        taken.append(selected["model"]["counter"].data_ptr() == state["model"]["counter"].data_ptr())  # type: ignore[index]  # mappings
        return selected

    def refused(*_arguments: object, **_more: object) -> object:
        raise AssertionError("an earlier release is read")

    monkeypatch.setattr(Snapshot, "take", noted)
    monkeypatch.setattr(Store, "load", refused)
    for step in (1, 2):
        command = ["publish", str(tmp_path / "store"), "--to", str(tmp_path / "to"), "--step", str(step)]
        done = CliRunner().invoke(commands, [*command, "--full-every", "1"])
        assert done.exit_code == 0, done.output
    assert taken == [True, True]
    monkeypatch.setattr(Store, "load", load)
    served = model()
    with Subscriber(str(tmp_path / "to"), served) as subscriber:
        subscriber.update()
    check(served, 2)


def test_single_buffer_and_kept_addresses_update_in_place(tmp_path: Path) -> None:
    """Test updates that keep the memory of all tensors: views of the weights see the new release."""
    rules, trained = Publish(str(tmp_path / "releases")), model()
    served, views = [model(), model()], []
    with (
        Publisher(rules) as publisher,
        Subscriber(rules.location, served[0], buffering="single") as single,
        Subscriber(rules.location, served[1], keep_addresses=True) as copying,
    ):
        views = [made[1].weight.data.view(-1)[5:] for made in served]
        for step in (1, 2):
            publish(publisher, trained, step)
            for subscriber, made, view in zip((single, copying), served, views, strict=True):
                update = subscriber.update()
                assert update is not None
                assert update.is_buffered is (subscriber is copying)
                assert update.pause_s > 0
                check(made, step)
                assert torch.equal(view, made[1].weight.data.view(-1)[5:])


def test_views_of_a_common_buffer_stay_views(tmp_path: Path) -> None:
    """Test tensors that are parts of one small buffer, which gets the bytes of each release."""
    flat = torch.zeros(30)
    served, trained = {"a": flat[:10], "b": flat[10:]}, {"a": torch.rand(10), "b": torch.rand(20)}
    with (
        Publisher(Publish(str(tmp_path / "releases"))) as publisher,
        Subscriber(str(tmp_path / "releases"), served) as subscriber,
    ):
        for step in (1, 2):
            publisher.publish({"model": trained}, step)
            subscriber.update()
            assert torch.equal(flat, torch.cat([trained["a"], trained["b"]]))
            trained["a"] += 1


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    """Test a model in shared memory, of which other processes see the updates."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model().share_memory()
    addresses = [parameter.data_ptr() for parameter in served.parameters()]
    with Publisher(rules) as publisher, Subscriber(rules.location, served) as subscriber:
        publish(publisher, trained, 1)
        subscriber.update()
    check(served, 1)
    assert [parameter.data_ptr() for parameter in served.parameters()] == addresses


def test_changed_weights_are_replaced_by_the_release(tmp_path: Path) -> None:
    """Test that a weight which the consumer changed in memory does not get into the next release."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    with Publisher(rules) as publisher, Subscriber(rules.location, served) as subscriber:
        publish(publisher, trained, 1)
        subscriber.update()
        with torch.no_grad():
            served[1].weight.mul_(0)
            served[2].weight.data[:5] = 7
        publish(publisher, trained, 2)
        subscriber.update()
        check(served, 2)


def test_weights_changed_after_a_prefetch_are_replaced(tmp_path: Path) -> None:
    """Test that a weight which the release leaves as it is does not keep a change that was made after the prefetch."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    with Publisher(rules) as publisher, Subscriber(rules.location, served, prefetch=True) as subscriber:
        publish(publisher, trained, 1)
        subscriber.wait()
        subscriber.update()
        trained.counter += 1
        publisher.publish({"model": trained}, 2)
        subscriber.wait()
        with torch.no_grad():
            served[1].weight.mul_(0)
        subscriber.update()
        assert torch.equal(served[1].weight, trained[1].weight)
        assert torch.equal(served.counter, trained.counter)


def test_tensors_replaced_after_a_prefetch_are_updated(tmp_path: Path) -> None:
    """Test a consumer that puts another parameter into the model between the prefetch and the update."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    with Publisher(rules) as publisher, Subscriber(rules.location, served, prefetch=True) as subscriber:
        for step in (1, 2):
            publish(publisher, trained, step)
            subscriber.wait()
            served[1].weight = torch.nn.Parameter(torch.zeros_like(served[1].weight))
            subscriber.update()
            check(served, step)


def test_tied_weights_stay_on_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a consumer that has a copy of a tied weight on another device, as with layers on several GPUs."""
    monkeypatch.setattr(weights, "_has_memory", lambda _tensor: True)  # the meta device stands for a GPU
    tied = torch.rand(300)
    served: dict[str, Any] = {"a": torch.zeros(300), "b": torch.zeros(300, device="meta")}
    with (
        Publisher(Publish(str(tmp_path / "releases"))) as publisher,
        Subscriber(str(tmp_path / "releases"), served) as subscriber,
    ):
        publisher.publish({"model": {"a": tied, "b": tied}}, 1)
        subscriber.update()
    assert torch.equal(served["a"], tied)
    assert served["b"].is_meta


@pytest.mark.parametrize("keep_addresses", [False, True])
def test_memory_outlasts_the_requests_that_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keep_addresses: bool
) -> None:
    """Test the replaced memory, and with kept addresses the second buffer. The queue of a GPU is simulated."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(weights, "outlast_queue", kept.append)
    addresses = {tensor.data_ptr() for tensor in served.state_dict().values()}
    with (
        Publisher(rules) as publisher,
        Subscriber(rules.location, served, keep_addresses=keep_addresses) as subscriber,
    ):
        publish(publisher, trained, 1)
        subscriber.update()
    found = {tensor.data_ptr() for tensor in kept}
    if keep_addresses:
        assert len(found - addresses) == len(addresses)
    else:
        assert found == addresses


def test_cached_device_memory_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the memory which an update has replaced allows a second buffer for the next one."""
    weight: Any = SimpleNamespace(tensors=[None], device=torch.device("cuda", 0), row=SimpleNamespace(nbytes=30 << 30))
    cached_bytes = 30 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (20 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 30 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: (30 << 30) + cached_bytes)
    with Subscriber(str(tmp_path / "releases"), {}) as subscriber:
        assert subscriber._fits([weight])
        cached_bytes = 0
        assert not subscriber._fits([weight])


@pytest.mark.parametrize("poll_s", [0, -1, float("nan")])
def test_invalid_times_between_looks_are_refused(poll_s: float) -> None:
    """Test times with which wait() would return before any release exists."""
    with pytest.raises(InvalidInputError, match="poll_s"):
        Subscriber("releases", {}, poll_s=poll_s)


@pytest.mark.parametrize("prefetch", [False, True])
def test_several_subscribers_take_one_release(tmp_path: Path, *, prefetch: bool) -> None:
    """Test a given release that is not the newest, also after the newest was fetched, and impossible ones."""
    location, trained, served = str(tmp_path / "releases"), model(), model()
    with Subscriber(location, served, prefetch=prefetch, poll_s=0.01) as subscriber:
        with pytest.raises(NotFoundError, match="has no release yet; publish release 1 first"):
            subscriber.update(1)
        with Publisher(Publish(location)) as publisher:
            for step in (1, 2, 3):
                publish(publisher, trained, step)
        assert subscriber.wait(60)
        for number in (2, 3):
            update = subscriber.update(number)
            assert update is not None
            assert update.number == number
            check(served, number)
            assert subscriber.update(number) is None
        with pytest.raises(InvalidInputError, match="release 1: the weights are of release 3"):
            subscriber.update(1)
        with pytest.raises(NotFoundError, match="step 4"):
            subscriber.update(4)
        check(served, 3)


def test_a_late_prefetch_does_not_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a prefetched release that is ready only after an update to a newer one."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    is_read, may_end = threading.Event(), threading.Event()
    prepare = Subscriber._prepare

    def slow(subscriber: Subscriber, number: int | None = None, *, overwrites: bool) -> object:
        prepared = prepare(subscriber, number, overwrites=overwrites)
        if not overwrites:
            is_read.set()
            may_end.wait(60)
        return prepared

    with Publisher(rules) as publisher, Subscriber(rules.location, served, prefetch=True) as subscriber:
        monkeypatch.setattr(Subscriber, "_prepare", slow)
        publish(publisher, trained, 1)
        assert is_read.wait(60)
        publish(publisher, trained, 2)
        subscriber.update(2)
        may_end.set()
        assert not subscriber.wait(0.5)
        assert subscriber.update() is None
        check(served, 2)


def test_empty_dict_receives_tensors(tmp_path: Path) -> None:
    """Test a dict that has no tensors yet."""
    served: dict[str, object] = {}
    trained = model()
    with (
        Publisher(Publish(str(tmp_path / "releases"))) as publisher,
        Subscriber(str(tmp_path / "releases"), served) as subscriber,
    ):
        for step in (1, 2):
            publish(publisher, trained, step)
            assert subscriber.update() is not None
            assert torch.equal(served["model.1.weight"], trained[1].weight)  # type: ignore[arg-type]  # a tensor
    assert served["model.tied.weight"] is served["model.0.weight"]


@pytest.mark.parametrize("buffering", ["double", "single"])
def test_subclasses_of_parameters_are_updated(tmp_path: Path, buffering: str) -> None:
    """Test a served model whose parameters are of a subclass, as those of inference engines."""

    class EngineParameter(torch.nn.Parameter):
        pass

    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    for layer in (served[1], served[2]):
        layer.weight = EngineParameter(layer.weight.data)
    with (
        Publisher(rules) as publisher,
        Subscriber(rules.location, served, buffering=buffering) as subscriber,  # type: ignore[arg-type]  # a literal
    ):
        for step in (1, 2):
            publish(publisher, trained, step)
            subscriber.update()
            check(served, step)
    assert type(served[1].weight) is EngineParameter


@pytest.mark.parametrize("prefetch", [False, True])
def test_inference_tensors_are_updated(tmp_path: Path, *, prefetch: bool) -> None:
    """Test a model that was created in torch.inference_mode(), and that keeps its tied weights."""
    rules, trained = Publish(str(tmp_path / "releases")), model()
    with torch.inference_mode():
        served = model()
    with Publisher(rules) as publisher, Subscriber(rules.location, served, prefetch=prefetch) as subscriber:
        for step in (1, 2):
            publish(publisher, trained, step)
            subscriber.wait()
            subscriber.update()
            check(served, step)
            assert served.tied.weight.data_ptr() == served[0].weight.data_ptr()


def test_interrupted_copies_are_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test Ctrl-C while tensors are overwritten at their addresses: no number is reported for the mixture."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    copied: list[torch.Tensor] = []
    copy = torch.Tensor.copy_

    def interrupted(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        if len(copied) == 3:
            raise KeyboardInterrupt
        return copy(tensor, source)

    with Publisher(rules) as publisher, Subscriber(rules.location, served, keep_addresses=True) as subscriber:
        for step in (1, 2):
            publish(publisher, trained, step)
            if step == 2:
                with monkeypatch.context() as patch:
                    patch.setattr(torch.Tensor, "copy_", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        subscriber.update()
                assert subscriber.number is None
            assert subscriber.update() is not None
            assert subscriber.number == step
            check(served, step)


class Generated:
    """Object whose state is a new tensor at each call."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a tensor that nothing else refers to."""
        return {"w": torch.full((1_000,), self.value)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Ignore a state."""


def test_temporary_tensors_are_not_tied(tmp_path: Path) -> None:
    """Test objects that return temporary tensors, which may have the same address one after another."""
    served: dict[str, object] = {}
    with (
        Publisher(Publish(str(tmp_path / "releases"))) as publisher,
        Subscriber(str(tmp_path / "releases"), served) as subscriber,
    ):
        publisher.publish({"model": {str(number): Generated(number) for number in range(8)}}, 0)
        subscriber.update()
    assert [served[f"model.{number}.w"][0] for number in range(8)] == [*range(8)]  # type: ignore[index]  # a tensor


@pytest.mark.parametrize(
    ("into", "message"),
    [
        (lambda: model(torch.float16), "float16 .* but release 1 .* float32"),
        (lambda: torch.nn.Linear(300, 700), "another architecture"),
        (lambda: {"model": {"0.weight": torch.zeros(2, 2)}}, "another architecture"),
        (lambda: {"model": {key: value.to("meta") for key, value in model().state_dict().items()}}, "to_empty"),
        (lambda: {"model": {key: value.to_sparse() for key, value in model().state_dict().items()}}, "dense tensor"),
    ],
    ids=["dtype", "module", "dict", "meta", "sparse"],
)
def test_other_architecture_or_dtype_is_refused(tmp_path: Path, into: Callable[[], object], message: str) -> None:
    """Test that a model which does not fit is named, and not changed."""
    served = into()
    before = [tensor.clone() for tensor in served.parameters()] if isinstance(served, torch.nn.Module) else []
    with Publisher(Publish(str(tmp_path / "releases"))) as publisher:
        publish(publisher, model(), 1)
    with Subscriber(str(tmp_path / "releases"), served) as subscriber:  # type: ignore[arg-type]  # a module or a dict
        with pytest.raises(StateMismatchError, match=message):
            subscriber.update()
        assert subscriber.number is None
    if isinstance(served, torch.nn.Module):
        assert all(torch.equal(a, b) for a, b in zip(before, served.parameters(), strict=True))


def test_sharded_model_is_refused(tmp_path: Path) -> None:
    """Test a model of which this process has only a shard of one tensor."""
    location, whole = str(tmp_path / "releases"), torch.zeros(3)
    with as_rank(0, 2), Publisher(Publish(location)) as publisher:
        shard = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        publisher.publish({"model": {"a": torch.ones(3), "b": torch.ones(4)}}, 1)
        subscriber = Subscriber(location, {"a": whole, "b": shard})
        with subscriber, pytest.raises(StateMismatchError, match=r"tensor b .* sharded"):
            subscriber.update()
    assert not whole.any()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """Test names that do not tell tensors apart, because keys may contain dots."""
    rules = Publish(str(tmp_path / "releases"), tensors="*")
    one, other = torch.zeros(3), torch.zeros(3)
    states: tuple[dict[str, object], ...] = ({}, {"a.b": one}, {"a.b": one, "a": {"b": other}})
    with Publisher(rules) as publisher:
        publisher.publish({"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}, 1)
        for served in states:
            with Subscriber(rules.location, served) as subscriber:
                with pytest.raises(StateMismatchError, match=r"a\.b is the name of two tensors"):
                    subscriber.update()
                assert subscriber.number is None
        publisher.publish({"a.b": torch.ones(3)}, 2)
        with (
            Subscriber(rules.location, states[-1]) as subscriber,
            pytest.raises(StateMismatchError, match=r"a\.b is the"),
        ):
            subscriber.update()
    assert not one.any()
    assert not other.any()


@pytest.mark.parametrize("buffering", ["double", "single"])
def test_damaged_release_changes_nothing(tmp_path: Path, buffering: str) -> None:
    """Test that a damaged release is refused, that an older one never replaces a newer one, and that the next heals."""
    rules, trained, served = Publish(str(tmp_path / "releases"), keep=5), model(), model()
    with Subscriber(rules.location, served, buffering=buffering) as subscriber:  # type: ignore[arg-type]  # a literal
        with Publisher(rules) as publisher:
            for step in (1, 2, 3):
                publish(publisher, trained, step)
                if step == 2:
                    subscriber.update()
        damage_release(tmp_path / "releases", 3)
        with pytest.raises(InconsistentCheckpointError, match="no release after 2"):
            subscriber.update()
        assert subscriber.number == 2
        check(served, 2)
        with Publisher(rules) as publisher:
            assert publish(publisher, trained, 4).deltas == 0
        subscriber.update()
        check(served, 4)


def test_damaged_newest_release_yields_the_one_before(tmp_path: Path) -> None:
    """Test that a subscriber skips a damaged release with a warning if an older one is news to it."""
    rules, trained, served = Publish(str(tmp_path / "releases"), full_every=1), model(), model()
    with Publisher(rules) as publisher:
        for step in (1, 2):
            publish(publisher, trained, step)
    damage_release(tmp_path / "releases", 2)
    with Subscriber(rules.location, served) as subscriber, pytest.warns(SkippedCheckpointWarning, match="step 2"):
        update = subscriber.update()
    assert update is not None
    assert update.number == 1
    check(served, 1)


def test_deleted_location_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """Test a location that is removed, and one that begins anew with lower numbers."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    with Subscriber(rules.location, served) as subscriber:
        with Publisher(rules) as publisher:
            publish(publisher, trained, 1)
            publish(publisher, trained, 2)
        subscriber.update()
        shutil.rmtree(rules.location)
        with pytest.raises(StorageError, match="does not exist any more"):
            subscriber.update()
        with Publisher(rules) as publisher:
            publish(publisher, trained, 3)
        with pytest.raises(NotFoundError, match="replaced"):
            subscriber.update()
        check(served, 2)


def test_alternating_publishers_give_unique_numbers(tmp_path: Path) -> None:
    """Test that a publisher notices the release of another one, and continues from it."""
    rules, trained, served = Publish(str(tmp_path / "releases")), model(), model()
    with Publisher(rules) as first, Publisher(rules) as second, Subscriber(rules.location, served) as subscriber:
        for number, publisher in enumerate((first, second, first, first, second), 1):
            assert publish(publisher, trained, number).number == number
            subscriber.update()
            check(served, number)


@pytest.mark.parametrize("compression", ["smallest", "auto", "off"])
def test_plain_releases_are_followed(tmp_path: Path, compression: Compression) -> None:
    """Test that all bytes are written without compression, or while the speed of the drive is not known."""
    rules, trained, served = Publish(str(tmp_path / "releases"), compression=compression), model(), model()
    with Publisher(rules) as publisher, Subscriber(rules.location, served) as subscriber:
        for number in (1, 2, 3):
            release = publish(publisher, trained, number)
            assert (release.written_bytes < 0.95 * release.state_bytes) == (compression == "smallest")
            subscriber.update()
            check(served, number)


def test_noise_is_published_plain(tmp_path: Path) -> None:
    """Test a tensor of which no codec makes fewer bytes, neither alone nor as a difference."""
    rules, served = Publish(str(tmp_path / "releases")), {"noise": torch.zeros(1 << 20, dtype=torch.uint8)}
    with Publisher(rules) as publisher, Subscriber(rules.location, served) as subscriber:
        for step in (1, 2, 3):
            noise = torch.randint(256, (1 << 20,), dtype=torch.uint8)
            assert publisher.publish({"model": {"noise": noise}}, step).written_bytes == 1 << 20
            subscriber.update()
            assert torch.equal(served["noise"], noise)


def test_invalid_rules_are_refused(tmp_path: Path) -> None:
    """Test rules that could not be followed, tensors that do not exist, and a shard."""
    wrongs = ({"every": 0}, {"full_every": 10}, {"keep": None}, {"dtype": torch.int8}, {"tensors": 3}, {"close_s": -1})
    wrongs += ({"compression": "best"},)
    for wrong in wrongs:
        with pytest.raises(InvalidInputError):
            Publish("x", **wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidInputError, match="spool"):
        Publisher(Publish("file:///tmp/x"))
    shard = asymcheck.TensorShard(torch.zeros(2), (4,), (0,))
    with Publisher(Publish(str(tmp_path / "releases"))) as publisher:
        with pytest.raises(InvalidInputError, match="matches no name"):
            publisher.publish({"optimizer": {"m": torch.zeros(3)}}, 1)
        with pytest.raises(InvalidInputError, match="sharded"):
            publisher.publish({"model": {"w": shard}}, 1)
        with pytest.raises(InvalidInputError, match="it has weight, bias"):
            publisher.publish(torch.nn.Linear(2, 2), 1)
    assert not list((tmp_path / "releases" / "manifests").iterdir())
    with Publisher(Publish(str(tmp_path / "releases"), tensors="*.w")) as publisher:
        assert publisher.publish({"model": {"w": torch.zeros(3), "shard": shard}}, 1).state_bytes == 12


def test_training_publishes_in_the_background(tmp_path: Path) -> None:
    """Test that a Checkpointer publishes every second step, and that a subscriber with a thread follows."""
    trained, served = model(), model(torch.bfloat16)
    location = str(tmp_path / "releases")
    rules = Publish(location, every=2, dtype=torch.bfloat16)
    with (
        Store.open(tmp_path / "store", create=True) as store,
        Subscriber(location, served, prefetch=True, poll_s=0.02) as subscriber,
    ):
        with Checkpointer(store, {"model": trained}, every=3, publish=rules) as checkpointer:
            for step in range(8):
                train_to(trained, step)
                checkpointer.step(step)
                time.sleep(0.05)
        with Store.open(location, read_only=True) as opened:
            published = opened.values(run="release")[0]
        steps = list[int]()
        while steps[-1:] != [published.metrics["training_step"]]:
            assert subscriber.wait(60)
            update = subscriber.update()
            assert update is not None
            check(served, update.step)
            steps.append(update.step)
    assert steps == sorted(set(steps))
    assert all(step % 2 == 0 for step in steps[:-1])


def test_steps_that_pass_a_multiple_are_published(tmp_path: Path) -> None:
    """Test a loop that counts batches and ends a step after every fourth one, so that no step is a multiple."""
    rules, trained = Publish(str(tmp_path / "releases"), every=8), model()
    with (
        Store.open(tmp_path / "store", create=True) as store,
        Checkpointer(store, {"model": trained}, every=100, publish=rules) as checkpointer,
    ):
        for step in range(3, 20, 4):
            checkpointer.step(step)
            running = checkpointer._publisher._running
            if running is not None:
                running.result(60)
    with Store.open(rules.location, read_only=True) as opened:
        published = [training_step(opened, release) for release in opened.checkpoints("release")]
    assert sorted(published) == [11, 19]


@pytest.mark.slow
def test_failed_release_hides_no_other_end(tmp_path: Path) -> None:
    """Test a release that fails before the training is told to end, and one before a callback raises at the close."""

    def failing(_report: object) -> None:
        raise RuntimeError("callback")

    rules = Publish("file:///proc/nope")
    with Store.open(tmp_path / "store", create=True) as store:
        told = Checkpointer(store, {"model": model()}, every=1, publish=rules, save_on_signal=Grace(signals=()))
        told.step(0)
        told.preempt(20.0)
        with pytest.raises(Preempted), pytest.warns(LostCheckpointWarning, match="PublishError: step 0"):
            told.step(1)
        other = Checkpointer(store, {"model": model()}, every=1, run="other", publish=rules, on_checkpoint=failing)
        other.step(0)
        with pytest.raises(RuntimeError), pytest.warns(LostCheckpointWarning, match="PublishError: step 0"):
            other.close()


def test_close_gives_up_a_release_that_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the error says so, that no checkpoint is lost, and that a late release is whole."""
    is_free, commit = threading.Event(), Publisher.commit

    def commit_late(publisher: Publisher, copies: dict[str, object], step: int) -> Release:
        is_free.wait(60)
        return commit(publisher, copies, step)

    monkeypatch.setattr(Publisher, "commit", commit_late)
    rules = Publish(str(tmp_path / "releases"), close_s=0.1)
    with Store.open(tmp_path / "store", create=True) as store:
        checkpointer = Checkpointer(store, {"model": model()}, every=1, publish=rules)
        checkpointer.step(0)
        running = checkpointer._publisher._running
        assert running is not None
        with pytest.raises(PublishError, match=r"step 0 was not published .* took longer than 0\.1 s .* close_s"):
            checkpointer.close()
        assert [row.step for row in store.checkpoints()] == [0]
        is_free.set()
        assert running.result(30).number == 1
    with Publisher(rules) as publisher:
        assert publish(publisher, model(), 1).number == 2


def test_failed_release_is_reported_to_the_training(tmp_path: Path) -> None:
    """Test that a location which disappears raises in the training loop, loses no checkpoint, and may come back."""
    location, trained = tmp_path / "releases", model()
    with (
        Store.open(tmp_path / "store", create=True) as store,
        Checkpointer(store, {"model": trained}, every=1, keep=None, publish=Publish(str(location))) as checkpointer,
    ):

        def settled(step: int) -> None:
            train_to(trained, step)
            checkpointer.step(step)
            checkpointer._publisher._running.exception()  # type: ignore[union-attr]  # in flight

        settled(0)
        shutil.rmtree(location)
        settled(1)
        train_to(trained, 2)
        with pytest.raises(PublishError, match="step 1 was not published"):
            checkpointer.step(2)
        settled(3)
        checkpointer.wait()
        assert [row.step for row in store.checkpoints()] == [0, 1, 2, 3]
    with Store.open(location, read_only=True) as opened:
        assert opened.values(run="release")[0].metrics["training_step"] == 3


@pytest.mark.slow
def test_failed_uploads_leave_a_bounded_spool(tmp_path: Path) -> None:
    """Test a remote location that lists its releases, but accepts no further pack."""
    remote = tmp_path / "remote"
    with Store.open(tmp_path / "spool", create=True) as spool:
        with Publisher(Publish(f"file://{remote}", keep=2), spool) as publisher:
            publisher.publish({"model": {"w": torch.randn(10_000)}}, 0)
            shutil.rmtree(remote / "packs")
            (remote / "packs").touch()
            for step in range(1, 5):
                with pytest.raises(StorageError):
                    publisher.publish({"model": {"w": torch.randn(10_000)}}, step)
        assert len(spool.checkpoints("release")) == 2
