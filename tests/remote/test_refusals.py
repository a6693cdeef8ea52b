"""Test that errors of file systems are distinguished: unreachable, no permission, and read errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from asymcheck import Store
from asymcheck.errors import ReadOnlyStoreError, RemoteUnreachableError, StorageError, TooManyFilesError
from asymcheck.storage.remote.remote_files import RemoteFiles, refusal
from tests.remote.conftest import CONFIG


@pytest.mark.parametrize(
    ("action", "number", "kind"),
    [
        *(("read 9 bytes from 0 of", number, RemoteUnreachableError) for number in (errno.ESTALE, errno.ENOTCONN)),
        *(("write to", number, RemoteUnreachableError) for number in (errno.ETIMEDOUT, errno.EHOSTDOWN)),
        *((action, errno.EACCES, RemoteUnreachableError) for action in ("read 9 bytes from 0 of", "list", "access")),
        *((action, errno.EACCES, ReadOnlyStoreError) for action in ("create", "rename", "remove", "create directory")),
        ("read 9 bytes from 0 of", errno.EMFILE, TooManyFilesError),
        ("read 9 bytes from 0 of", errno.EIO, StorageError),
    ],
)
def test_a_mounted_file_system(action: str, number: int, kind: type[StorageError]) -> None:
    """Test that the error number decides, and for "permission denied" also the operation."""
    found = refusal(f"{action} file:///x", OSError(number, os.strerror(number)), is_local=True)
    assert type(found) is kind


@pytest.mark.parametrize("answer", ["connection refused", "403 Forbidden"])
def test_a_client_without_credentials_says_so(answer: str) -> None:
    """Test any answer of the address at which clients ask for credentials last."""
    error = OSError(f"Error performing PUT http://169.254.169.254/latest/api/token: {answer}")
    assert "no credentials were found" in str(refusal("read s3://bucket/x", error, is_local=False))


def test_want_of_memory_is_no_damage() -> None:
    """Test that a lack of memory says nothing about the file."""
    assert type(refusal("read file:///x", MemoryError(), is_local=True)) is RemoteUnreachableError


def test_packs_that_may_not_be_read_are_not_taken_for_damaged(
    store: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that the newest checkpoint is not replaced by an older one."""
    packs = Path(folder.removeprefix("file://")) / "packs"
    with Store.open(store, config=CONFIG, create=True) as opened:
        opened.push(folder, 1)
        before = set(packs.iterdir())
        opened.push(folder, 2)
    do: Callable[..., object] = RemoteFiles._do

    def denied() -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def refused(self: RemoteFiles, action: str, path: PurePath, call: Callable[..., object], *rest: float) -> object:
        is_new = path.suffix == ".pack" and Path(path) not in before
        return do(self, action, path, denied if is_new else call, *rest)

    monkeypatch.setattr(RemoteFiles, "_do", refused)
    with (
        Store.open(folder, config=CONFIG, create=True) as remote,
        pytest.raises(RemoteUnreachableError, match="no permission"),
    ):
        remote.load()
