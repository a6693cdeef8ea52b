"""Adapt hdfs-native's fsspec file system to torch DCP, for the workload ``hdfs``.

DCP asks the file that it writes for its position, but hdfs-native's file has no ``tell`` (``io.UnsupportedOperation:
seek``). DCP then removes the file, and closing the file hides the reason behind a ``FileNotFoundError`` of the
NameNode. Reading is not adapted: DCP's reader needs ``readinto``, which hdfs-native's file lacks, too
(``NotImplementedError``). Seen with torch 2.13, fsspec 2026.9 and hdfs-native 0.14.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from hdfs_native import FileWriter
from hdfs_native.fsspec import HdfsFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed


class _Written(io.RawIOBase):
    """A file opened for writing, which tracks its length and is closed once."""

    def __init__(self, inner: FileWriter) -> None:
        self._inner = inner
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        view = memoryview(data)
        # The client is fast only for bytes objects.
        self._inner.write(data if isinstance(data, bytes) else bytes(view))
        self._at += view.nbytes
        return view.nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._inner.close()


class _FileSystem(HdfsFileSystem):
    """hdfs-native's file system, with an adapted file for writing."""

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:  # noqa: ANN401 - fsspec's way
        opened = super()._open(path, mode, *args, **options)
        return _Written(opened) if mode == "wb" else opened


def save(state: Mapping[str, object], url: str) -> None:
    """Save a state to a folder in HDFS by ``dcp.save`` with torch's writer for fsspec."""
    where = urlsplit(url)
    writer = FsspecWriter(url)
    # fsspec caches file systems and drops them in forked children, where the client waits for its threads forever.
    HdfsFileSystem.clear_instance_cache()
    cast("Any", writer.fs).fs = _FileSystem(where.hostname, where.port, skip_instance_cache=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_distributed(dict(state), storage_writer=writer)
