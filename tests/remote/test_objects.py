"""Test locations in an object store, on a real S3 server: SeaweedFS."""

from __future__ import annotations

import dataclasses
import threading
import traceback
import uuid
from pathlib import Path, PurePosixPath

import pytest
import torch

from asymcheck import Store
from asymcheck.errors import InvalidInputError, ReadOnlyStoreError, StorageError
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.conftest import CONFIG, REMOTE, check_location, check_state, config, save_steps
from tools.local_objects import BUCKET, LocalObjects, Proxy, variables

pytestmark = pytest.mark.slow


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, user: str = "writer") -> None:
    """Make clients use a server."""
    for name, value in variables(endpoint, user).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty location in the bucket."""
    use(monkeypatch, objects.endpoint)
    return f"s3://{BUCKET}/tests/{uuid.uuid4().hex}"


def push(store: Path, location: str) -> None:
    """Push all checkpoints."""
    with Store.open(store, config=CONFIG) as opened:
        opened.push(location, everything=True)


def test_checkpoints_return_from_an_object_store(store: Path, bucket: str, tmp_path: Path) -> None:
    """Test push, a direct load, and a pull into an empty store."""
    push(store, bucket)
    check_location(bucket, 1, 2)
    with Store.open(tmp_path / "other", config=CONFIG, create=True) as other:
        other.pull(bucket, everything=True)
        check_state(other.load(2), 2)


def test_sixteen_writers_of_one_name_have_one_winner(objects: LocalObjects, bucket: str) -> None:
    """Test the put of a head record by writers with different bytes, each with its own client."""
    writers = [RemoteFiles(parse_location(bucket), REMOTE) for _ in range(16)]
    path = writers[0].top / "heads" / "run" / "00000002.head"
    start, won = threading.Barrier(16), list[int]()

    def put(number: int) -> None:
        start.wait()
        if writers[number].put_small(path, bytes([number]) * 100):
            won.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert writers[0].read_small(path, 100) == bytes(won) * 100


def test_a_service_that_ignores_preconditions_is_refused(
    objects: LocalObjects, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a server that overwrites objects despite ``If-None-Match``."""

    def ignore(method: str, path: str, headers: dict[str, str]) -> None:
        # The signature covers the header, so the proxy deletes the existing object instead.
        if method == "PUT" and headers.get("if-none-match") == "*":
            raw.delete(PurePosixPath("/", *PurePosixPath(path).parts[2:]))

    raw = RemoteFiles(parse_location(bucket), REMOTE)
    with Proxy(objects.endpoint, ignore) as proxy:
        use(monkeypatch, proxy.endpoint)
        with pytest.raises(InvalidInputError, match="ignores conditional puts"):
            push(store, bucket)
    assert raw.walk(raw.top, recursive=True) == []


@pytest.mark.parametrize("status", [409, 500, 502])
def test_a_lost_answer_is_resolved_by_reading_back(
    objects: LocalObjects, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Test an error for each first put of a name: after the object was stored, and with 409 without storing it."""
    seen: set[str] = set()

    def lose(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes] | None:
        if method != "PUT" or path in seen:
            return None
        seen.add(path)
        if status != 409:
            proxy.forward(method, path, headers)
        return status, b""

    with Proxy(objects.endpoint, lose) as proxy:
        use(monkeypatch, proxy.endpoint)
        push(store, bucket)
    assert len(seen) > 5
    use(monkeypatch, objects.endpoint)
    check_location(bucket, 1, 2)


def test_a_throttled_push_and_restore_complete(
    objects: LocalObjects, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a server that refuses two of three requests with status 503."""
    count = 0

    def throttle(*_: object) -> tuple[int, bytes] | None:
        nonlocal count
        count += 1
        return (503, b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>") if count % 3 else None

    with Proxy(objects.endpoint, throttle) as proxy:
        use(monkeypatch, proxy.endpoint)
        with Store.open(store, config=CONFIG) as opened:
            opened.push(bucket, 1)
        with Store.open(bucket, config=CONFIG) as remote:
            check_state(remote.load(1), 1)


@pytest.mark.slow(long=["kill_at1"])
@pytest.mark.parametrize("kill_at", [[6], [1, 6, 11]])
def test_a_server_that_is_killed_during_a_push_loses_no_reported_checkpoint(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: list[int]
) -> None:
    """Test SIGKILL at some requests of a push, each followed by a restart and a push that continues."""
    save_steps(store_path, 1, 2, 3)
    location = f"s3://{BUCKET}/killed"
    with LocalObjects(tmp_path / "server") as server:
        left, puts = list(kill_at), 0

        def kill(method: str, *_: object) -> None:
            nonlocal puts
            puts += method == "PUT"
            if left and puts == left[0]:
                left.pop(0)
                server.kill()

        with Proxy(server.endpoint, kill) as proxy:
            use(monkeypatch, proxy.endpoint)
            reported: list[int] = []
            quick = config(attempts=1, deadline_s=2.0)
            while len(reported) < 3:
                step = len(reported) + 1
                try:
                    with Store.open(store_path, config=quick) as opened:
                        opened.push(location, step)
                    reported.append(step)
                except StorageError:
                    server.start()
                    # A machine that has nothing restores all that was reported.
                    for known in reported:
                        with Store.open(location, config=CONFIG) as remote:
                            check_state(remote.load(known), known)
            assert left == []
            check_location(location, 1, 2, 3)


def test_a_bucket_that_does_not_exist_or_is_not_writable_is_named(
    objects: LocalObjects, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test push and open. The key of the server is in no message."""
    with pytest.raises(StorageError, match="bucket s3://no-such-bucket does not exist"):
        push(store, "s3://no-such-bucket/x")
    push(store, bucket)
    use(monkeypatch, objects.endpoint, "reader")
    check_location(bucket, 1, 2)
    with pytest.raises(ReadOnlyStoreError, match="no permission") as refused:
        push(store, f"{bucket}/other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed-password")
    with pytest.raises(StorageError, match="no permission") as denied:
        Store.open(bucket, config=CONFIG)
    for error in (refused, denied):
        assert "password" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "location",
    ["s3://me:hunter2@bucket/x", "s3://bucket/x?secret_access_key=hunter2", "az://c/x?sas_token=hunter2&#"],
    ids=["user", "key", "signature"],
)
def test_credentials_in_a_location_are_refused_and_not_repeated(location: str) -> None:
    """Test URIs, whose text would be printed in messages."""
    with pytest.raises(InvalidInputError, match="is not allowed") as refused:
        Store.open(location)
    assert "hunter2" not in str(refused.value)


def test_a_load_of_the_model_requests_no_byte_of_the_optimizer(
    objects: LocalObjects, bucket: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the bytes of all responses."""
    state = {
        "model": {f"w{number}": torch.randn(50_000) for number in range(4)},
        "optimizer": {f"m{number}": torch.randn(50_000) for number in range(16)},
    }
    small = dataclasses.replace(config(gap_bytes=0, pack_bytes=16 << 20), partition_bytes=64 << 10)
    with Store.open(store_path, config=small, create=True) as opened:
        opened.save(state, step=1)
        opened.push(bucket)
    with Proxy(objects.endpoint) as proxy:
        use(monkeypatch, proxy.endpoint)
        with Store.open(bucket, config=small) as remote:
            loaded = remote.load(tensors="model.*")
    assert torch.equal(loaded["model"]["w3"], state["model"]["w3"])
    received = sum(count for method, _, count in proxy.requests if method == "GET")
    assert 4 * 200_000 < received < 4 * 200_000 + 150_000


def test_collection_removes_announced_packs_later(bucket: str, store: Path) -> None:
    """Test that the first collection announces garbage, and that the second one removes it."""
    push(store, bucket)
    with Store.open(bucket, config=config(grace_s=0.0)) as remote:
        remote.delete(2)
        assert [remote.gc().freed_packs > 0 for _ in range(3)] == [False, True, False]
    check_location(bucket, 1)
    files = RemoteFiles(parse_location(bucket), REMOTE)
    assert not [entry for entry in files.walk(files.top, recursive=True) if entry.path.suffix == ".doomed"]


def test_a_push_relies_on_no_announced_pack(bucket: str, store: Path) -> None:
    """Test that partitions are sent again, so that another collection may remove the announced packs at any time."""
    push(store, bucket)
    files = RemoteFiles(parse_location(bucket), REMOTE)
    with Store.open(bucket, config=config(grace_s=0.0)) as remote:
        remote.delete(2)
        remote.gc()
    announced = [entry.path for entry in files.walk(files.top / "packs") if entry.path.suffix == ".doomed"]
    assert announced
    push(store, bucket)
    for path in announced:
        files.delete(path.with_name(f"{path.name.partition('.')[0]}.pack"))
    check_location(bucket, 1, 2)
