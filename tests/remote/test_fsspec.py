"""Test locations that fsspec opens; the other tests of locations run with an SFTP server, too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from asymcheck import Store
from asymcheck.errors import InvalidInputError, ReadOnlyStoreError, RemoteUnreachableError
from asymcheck.storage.remote.location import parse_location
from asymcheck.storage.remote.remote_files import RemoteFiles
from tests.remote.conftest import CONFIG, REMOTE, check_location, config
from tools.local_sftp import VARIABLES, LocalSftp


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalSftp]:
    """Return an SFTP server of this test."""
    (tmp_path / "sftp").mkdir()
    with LocalSftp(tmp_path / "sftp") as server:
        yield server


def test_a_location_on_sftp(store: Path, server: LocalSftp, tmp_path: Path) -> None:
    """Test a push, a load, a deletion and a collection."""
    location = f"{server.url}/runs/a b"
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(location, everything=True)
    check_location(location, 1, 2)
    with Store.open(location, config=config(grace_s=0.0), create=True) as remote:
        remote.delete(2)
        assert remote.gc().freed_packs > 0
    check_location(location, 1)
    assert (tmp_path / "sftp" / "runs" / "a b" / "asymcheck.store").exists()


@pytest.mark.slow
def test_a_lost_connection_is_opened_again(store: Path, server: LocalSftp) -> None:
    """Test a server that restarts between two pushes, and a server that is away."""
    location = f"{server.url}/remote"
    with Store.open(store, config=config(attempts=1), remote=location, create=True) as opened:
        opened.push(location, 1)
        server.stop()
        with pytest.raises(RemoteUnreachableError):
            opened.push(location, 2)
        with pytest.raises(RemoteUnreachableError):
            Store.open(location, config=CONFIG)
        server.start()
        opened.push(location, 2)
    check_location(location, 1, 2)
    with Store.open(location, config=config(attempts=1)) as remote:
        assert len(remote.checkpoints()) == 2
        server.stop()
        with pytest.raises(RemoteUnreachableError):
            remote.checkpoints()
        server.start()
        assert len(remote.checkpoints()) == 2
        server.stop()
        server.start()
        assert len(remote.checkpoints()) == 2


@pytest.mark.slow
def test_a_password_comes_from_the_environment(store: Path, tmp_path: Path) -> None:
    """Test the variable that fsspec reads, and the error without it."""
    (tmp_path / "sftp").mkdir()
    with LocalSftp(tmp_path / "sftp", needs_password=True) as server:
        command = [sys.executable, "-m", "asymcheck", "push", str(store), f"{server.url}/remote"]
        environment = {**os.environ, **VARIABLES}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 5
    assert "Permission denied for user trainer" in refused.stderr
    assert list((tmp_path / "sftp" / "remote" / "manifests").iterdir())


@pytest.mark.slow
def test_the_key_of_the_server_is_checked_on_request(store: Path, server: LocalSftp, tmp_path: Path) -> None:
    """Test the option of sshfs, with the key of this server and with that of another one."""
    (tmp_path / "sftp2").mkdir()
    (tmp_path / "known").write_text(server.known_host)
    with LocalSftp(tmp_path / "sftp2") as other, Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(f"{server.url}/remote?known_hosts={tmp_path}/known")
        (tmp_path / "known").write_text(f"[127.0.0.1]:{server.port} {other.known_host.partition(' ')[2]}")
        with pytest.raises(RemoteUnreachableError, match="Host key is not trusted"):
            opened.push(f"{server.url}/remote?known_hosts={tmp_path}/known")


class _Careful(LocalFileSystem):
    """File system that caches listings, counts requests at the same time, and can lose its connection."""

    protocol = "careful"
    cachable = False
    is_away = False
    uses = overlaps = 0
    isdir = AbstractFileSystem.isdir

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - signature of fsspec
        super().__init__(**options)
        self._listed: dict[str, list[dict[str, Any]]] = {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - signature of fsspec
        """Return the entry of a path."""
        _Careful.uses += 1
        _Careful.overlaps += _Careful.uses > 1
        time.sleep(0.001)
        _Careful.uses -= 1
        if self.is_away:
            raise ConnectionResetError("the server is away")
        return dict(super().info(path, **options))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:  # noqa: ANN401 - signature of fsspec
        """List a folder, as it was at the first time."""
        if path not in self._listed:
            self._listed[path] = super().ls(path, detail=True, **options)
        return self._listed[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget all listings."""
        del path
        self._listed.clear()


def test_listings_are_not_cached(store: Path, tmp_path: Path) -> None:
    """Test a location that another program changes meanwhile."""
    fsspec.register_implementation("careful", _Careful, clobber=True)
    location = f"fsspec+careful://{tmp_path}/remote"
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(location, 1)
        with Store.open(location, config=CONFIG) as remote:
            assert [one.step for one in remote.checkpoints()] == [1]
            opened.push(f"file://{tmp_path}/remote", 2)
            assert [one.step for one in remote.checkpoints()] == [1, 2]
            assert remote.verify(deep=True) == []


def test_requests_are_sent_one_at_a_time(tmp_path: Path) -> None:
    """Test threads that read at once in a file system that is not asynchronous."""
    fsspec.register_implementation("careful", _Careful, clobber=True)
    (tmp_path / "file").write_bytes(b"bytes")
    files = RemoteFiles(parse_location(f"fsspec+careful://{tmp_path}"), REMOTE)
    paths = [PurePosixPath(tmp_path, "file")] * 50
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda path: files.read_small(path, 10), paths)) == [b"bytes"] * 50
    assert _Careful.overlaps == 0


def test_a_location_without_connection_is_not_empty(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an error for which fsspec says that a folder does not exist."""
    fsspec.register_implementation("careful", _Careful, clobber=True)
    location = f"fsspec+careful://{tmp_path}/remote"
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(location, 1)
    with Store.open(location, config=config(attempts=1)) as remote:
        monkeypatch.setattr(_Careful, "is_away", True)
        with pytest.raises(RemoteUnreachableError, match="the server is away"):
            remote.checkpoints()


def test_a_file_system_that_copies_is_only_read(store: Path) -> None:
    """Test that no reader can see a half copy of a manifest."""
    with (
        Store.open(store, config=CONFIG, create=True) as opened,
        pytest.raises(ReadOnlyStoreError, match="fsspec copies a file here instead of renaming it"),
    ):
        opened.push("fsspec+memory://runs/a")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("fsspec+ssh://me:hidden@host/runs", "a password is not allowed.*FSSPEC_SSH_PASSWORD"),
        ("fsspec+ssh://me@host/runs?password=hidden", "the option 'password' is not allowed"),
        ("fsspec+ssh://me@host/", "name a directory below the root"),
        ("fsspec+nonsense://host/runs", "Protocol not known: nonsense"),
        ("fsspec+ftp://host/runs", "takes files for missing.*use SFTP, as in fsspec\\+ssh://host/runs"),
        ("fsspec+http://host/runs", "paths of this protocol are URLs"),
    ],
)
def test_unusable_locations_are_refused(location: str, message: str) -> None:
    """Test that the message names the location, but no password."""
    with pytest.raises(InvalidInputError, match=message) as caught:
        Store.open(location)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["ssh", "sftp"])
def test_missing_sshfs_is_named_with_its_extra(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test fsspec without sshfs, which asks for another library."""
    own = {"class": "fsspec.implementations.sftp.SFTPFileSystem", "err": "install another library"}
    monkeypatch.setitem(known_implementations, protocol, own)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(InvalidInputError, match=r"sshfs is not installed; install asymcheck\[sftp\]"):
        Store.open(f"fsspec+{protocol}://me@host/runs")


def test_a_path_that_fsspec_cuts_is_refused(server: LocalSftp) -> None:
    """Test a question mark, behind which fsspec expects options."""
    with pytest.raises(InvalidInputError, match="fsspec takes the path for '/what'"):
        Store.open(f"{server.url}/what%3F")
