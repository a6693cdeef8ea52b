"""Test locations in an object store, on real servers: SeaweedFS for S3, and Azurite for Azure Blob Storage.

For Google Cloud Storage, a proxy translates the requests for SeaweedFS (see :mod:`tools.local_gcs`).
"""

from __future__ import annotations

import base64
import dataclasses
import threading
import time
import traceback
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pytest
import torch
from pyarrow.fs import S3FileSystem

from asymcheck import Checkpointer, Push, Store
from asymcheck.errors import InvalidInputError, ReadOnlyStoreError, RemoteUnreachableError, StorageError
from asymcheck.storage.remote import remote_files
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.object_stores import _ObstoreClient
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.conftest import CONFIG, REMOTE, check_location, check_state, config, save_steps
from tools import local_azure, local_gcs, local_objects
from tools.local_azure import LocalAzure
from tools.local_gcs import LocalGcs
from tools.local_objects import BUCKET, LocalObjects, Proxy

pytestmark = pytest.mark.slow


Server = LocalObjects | LocalAzure | LocalGcs


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, user: str = "writer") -> None:
    """Make clients use a server."""
    modules = (local_azure, local_gcs)
    found = {name: value for module in modules for name, value in module.variables(endpoint).items()}
    for name, value in {**local_objects.variables(endpoint, user), **found}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAzure]:
    """Return an Azure server."""
    if not local_azure.is_installed():
        pytest.skip("Azurite is missing: make node")
    with LocalAzure(tmp_path_factory.mktemp("azure") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGcs]:
    """Return a server that stands for Google Cloud Storage."""
    with LocalGcs(tmp_path_factory.mktemp("gcs") / "server") as server:
        yield server


@pytest.fixture(params=["objects", "azure", "gcs"])
def server(request: pytest.FixtureRequest) -> Server:
    """Return each server."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty location on the server."""
    use(monkeypatch, server.endpoint)
    names = {LocalObjects: f"s3://{BUCKET}", LocalAzure: f"az://{local_azure.CONTAINER}", LocalGcs: f"gs://{BUCKET}"}
    return f"{names[type(server)]}/tests/{uuid.uuid4().hex}"


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


def test_names_with_a_prefix_are_listed(bucket: str) -> None:
    """Test that a listing by prefix has the names that begin with it, and no others."""
    files = RemoteFiles(parse_location(bucket), REMOTE)
    names = ["0a.pack", "0b00.pack", "0b01.doomed", "0b01.pack", "0c.pack"]
    for name in names:
        files.put_small(files.top / "packs" / name, b"")
    listed = {
        prefix: [entry.path.name for entry in files.walk(files.top / "packs", prefix=prefix)]
        for prefix in ("0b", "0a", "0c", "0", "1")
    }
    assert listed == {prefix: [name for name in names if name.startswith(prefix)] for prefix in listed}


@pytest.mark.parametrize("server", ["objects"], indirect=True)
def test_a_service_that_lists_names_in_any_order(bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test pushes and restores if listings by prefix end too early."""
    monkeypatch.setattr(_ObstoreClient, "beginning", lambda *_: None)
    push(store, bucket)
    save_steps(store, 3)
    push(store, bucket)
    check_location(bucket, 1, 2, 3)


@pytest.mark.parametrize("server", ["objects"], indirect=True)
def test_a_folder_made_in_a_console_is_empty(server: Server, bucket: str, store: Path) -> None:
    """Test a push to a location whose folders exist as empty objects with names that end in a slash."""
    keys = local_objects.variables(server.endpoint)
    other = S3FileSystem(
        endpoint_override=server.endpoint,
        access_key=keys["AWS_ACCESS_KEY_ID"],
        secret_key=keys["AWS_SECRET_ACCESS_KEY"],
    )
    raw = RemoteFiles(parse_location(bucket), REMOTE)
    other.create_dir(f"{BUCKET}/{raw.top.relative_to('/')}/packs", recursive=True)
    assert raw.list(raw.top) == ["packs"]
    push(store, bucket)
    check_location(bucket, 1, 2)
    with Store.open(bucket, config=CONFIG) as opened:
        assert opened.verify() == []


def test_sixteen_writers_of_one_name_have_one_winner(server: Server, bucket: str) -> None:
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
    server: Server, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a server that overwrites objects despite the condition of a put."""

    def ignore(method: str, path: str, headers: dict[str, str]) -> None:
        # The signature covers the header, so the proxy deletes the existing object instead.
        if method == "PUT" and {"if-none-match", "x-goog-if-generation-match"}.intersection(headers):
            raw.delete(PurePosixPath("/", *PurePosixPath(unquote(path)).parts[root:]))

    raw = RemoteFiles(parse_location(bucket), REMOTE)
    root = 3 if isinstance(server, LocalAzure) else 2
    with Proxy(server.endpoint, ignore) as proxy:
        use(monkeypatch, proxy.endpoint)
        with pytest.raises(InvalidInputError, match="ignores conditional puts"):
            push(store, bucket)
    assert raw.walk(raw.top, recursive=True) == []


@pytest.mark.slow(long=["azure-50?", "gcs-50?"])
@pytest.mark.parametrize("status", [409, 500, 502])
def test_a_lost_answer_is_resolved_by_reading_back(
    server: Server, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch, status: int
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

    with Proxy(server.endpoint, lose) as proxy:
        use(monkeypatch, proxy.endpoint)
        push(store, bucket)
    assert len(seen) > 5
    use(monkeypatch, server.endpoint)
    check_location(bucket, 1, 2)


@pytest.mark.slow(long=["azure", "gcs"])
def test_a_throttled_push_and_restore_complete(
    server: Server, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a server that refuses two of three requests with status 503."""
    count = 0

    def throttle(*_: object) -> tuple[int, bytes] | None:
        nonlocal count
        count += 1
        return (503, b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>") if count % 3 else None

    with Proxy(server.endpoint, throttle) as proxy:
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
    server: Server, bucket: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test push and open. The key of the server is in no message. Only SeaweedFS has users with fewer rights."""
    missing = f"{bucket.partition('://')[0]}://no-such-bucket"
    with pytest.raises(StorageError, match=f"bucket {missing} does not exist"):
        push(store, f"{missing}/x")
    push(store, bucket)
    errors = []
    if isinstance(server, LocalObjects):
        use(monkeypatch, server.endpoint, "reader")
        check_location(bucket, 1, 2)
        with pytest.raises(ReadOnlyStoreError, match="no permission") as refused:
            push(store, f"{bucket}/other")
        errors.append(refused)
    if isinstance(server, LocalGcs):
        return
    guessed = base64.b64encode(b"guessed-password").decode()
    for name in ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, guessed)
    with pytest.raises(StorageError, match="no permission") as denied:
        Store.open(bucket, config=CONFIG)
    for error in (*errors, denied):
        text = "".join(traceback.format_exception(error.value))
        assert "password" not in text
        assert guessed not in text


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [(400, "ExpiredToken", "renew the credentials"), (403, "RequestTimeTooSkewed", "set the clock")],
)
def test_a_push_that_is_refused_half_way_continues_later(
    objects: LocalObjects, store: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, advice: str
) -> None:
    """Test credentials that expire, and a wrong clock: the error says so, and no reported checkpoint is lost."""
    location, refuses = f"s3://{BUCKET}/tests/{uuid.uuid4().hex}", False

    def refuse(method: str, path: str, _headers: dict[str, str]) -> tuple[int, bytes] | None:
        nonlocal refuses
        refuses |= method == "PUT" and "/manifests/" in unquote(path) and bool(reported)
        return (status, f"<Error><Code>{code}</Code><Message>Refused.</Message></Error>".encode()) if refuses else None

    reported: list[int] = []
    with Proxy(objects.endpoint, refuse) as proxy:
        use(monkeypatch, proxy.endpoint)
        with Store.open(store, config=config(attempts=1)) as opened:
            opened.push(location, 1)
            reported.append(1)
            with pytest.raises(StorageError, match=f"{code}.*{advice}"):
                opened.push(location, 2)
    use(monkeypatch, objects.endpoint)
    check_location(location, 1)
    push(store, location)
    check_location(location, 1, 2)


def test_a_large_object_may_take_longer_than_other_requests(
    objects: LocalObjects, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the time-out of the client does not end an upload before its deadline."""
    location = f"s3://{BUCKET}/tests/{uuid.uuid4().hex}"
    monkeypatch.setattr(remote_files, "_SLOW_BYTES_PER_S", 4096.0)

    def wait(method: str, path: str, _headers: dict[str, str]) -> None:
        if method == "PUT" and "/packs/" in unquote(path):
            time.sleep(2.0)

    with Proxy(objects.endpoint, wait) as proxy:
        use(monkeypatch, proxy.endpoint)
        with Store.open(store, config=config(attempts=1, deadline_s=1.0)) as opened:
            opened.push(location, 1)
        check_location(location, 1)


def test_a_slow_link_is_given_up_and_tried_again(
    objects: LocalObjects, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test answers that come later than the deadline."""
    location, is_fast = f"s3://{BUCKET}/tests/{uuid.uuid4().hex}", threading.Event()
    is_fast.set()

    def wait(method: str, path: str, _headers: dict[str, str]) -> None:
        if method == "PUT" and "/packs/" in unquote(path):
            is_fast.wait(60)

    with Proxy(objects.endpoint, wait) as proxy:
        use(monkeypatch, proxy.endpoint)
        with Store.open(store, config=CONFIG) as opened:
            opened.push(location, 1)
            is_fast.clear()
            impatient = config(attempts=2, deadline_s=1.0)
            with Store.open(store, config=impatient) as other, pytest.raises(RemoteUnreachableError):
                other.push(location, 2)
            check_location(location, 1)
            is_fast.set()
            opened.push(location, 2)
        check_location(location, 1, 2)


def test_a_versioned_bucket(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test pushes, a deletion and a collection in a bucket that keeps old versions of its objects."""
    save_steps(store_path, 1, 2, 3)
    location = f"s3://{BUCKET}/versioned"
    with LocalObjects(tmp_path / "server", has_users=False) as server:
        text = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        url = f"{server.endpoint}/{BUCKET}"
        request = urllib.request.Request(f"{url}?versioning", text, method="PUT")  # noqa: S310 - this machine
        urllib.request.urlopen(request).close()  # noqa: S310 - as above
        use(monkeypatch, server.endpoint)
        push(store_path, location)
        with Store.open(location, config=config(grace_s=0.0)) as remote:
            remote.delete(1)
            for _ in range(2):
                remote.gc()
        check_location(location, 2, 3)
        push(store_path, location)
        check_location(location, 1, 2, 3)
        with urllib.request.urlopen(f"{url}?versions") as answer:  # noqa: S310 - as above
            assert b"DeleteMarker" in answer.read()


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
    server: Server, bucket: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
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
    with Proxy(server.endpoint) as proxy:
        use(monkeypatch, proxy.endpoint)
        with Store.open(bucket, config=small) as remote:
            loaded = remote.load(tensors="model.*")
    assert torch.equal(loaded["model"]["w3"], state["model"]["w3"])
    received = sum(count for method, _, count in proxy.requests if method == "GET")
    assert 4 * 200_000 < received < 4 * 200_000 + 150_000


@pytest.mark.parametrize("server", ["objects"], indirect=True)
def test_a_push_reads_nothing_of_the_packs_that_it_sent_earlier(
    server: Server, bucket: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the requests for the second checkpoint of a training: packs are only put, and three times listed."""
    state = {"w": torch.randn(50_000)}
    with Proxy(server.endpoint) as proxy:
        use(monkeypatch, proxy.endpoint)
        with (
            Store.open(store_path, config=CONFIG, create=True) as opened,
            Checkpointer(opened, state, every=1, push=Push(bucket)) as checkpointer,
        ):
            for step in range(2):
                before = len(proxy.requests)
                state["w"] += 1
                checkpointer.step(step)
                checkpointer.wait("remote")
                everything = [method for method, _, _ in proxy.requests[before:]]
                requests = [(method, path) for method, path, _ in proxy.requests[before:] if "packs" in path]
        with Store.open(bucket, config=CONFIG) as remote:
            assert torch.equal(remote.load(0)["w"] + 1, remote.load(1)["w"])
    # Besides those of packs: listings of the run and of head records, a head record, and the manifest.
    assert len(everything) == len(requests) + 4
    read = [path for method, path in requests if method == "GET"]
    assert len(read) == 3
    assert not [path for path in read if path.endswith(".pack")]


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
