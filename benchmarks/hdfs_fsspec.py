"""torch DCP through fsspec, for the workload ``hdfs``: what it takes that DCP and hdfs-native meet.

As they come they do not: DCP asks the file that it writes for its place in it, and hdfs-native's has no ``tell``
(``io.UnsupportedOperation: seek``). DCP then removes the file, and closing that hides the reason behind a
``FileNotFoundError`` of the NameNode. Reading is not adapted: DCP's reader wants a ``readinto``, which hdfs-native's
file has not either (``NotImplementedError``). Seen with torch 2.13, fsspec 2026.9 and hdfs-native 0.14.
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
    """A file that is being written, which knows how long it is, and is closed once."""

    def __init__(self, inner: FileWriter) -> None:
        self._inner = inner
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        view = memoryview(data)
        # The client is fast for bytes only.
        self._inner.write(data if isinstance(data, bytes) else bytes(view))
        self._at += view.nbytes
        return view.nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._inner.close()


class _FileSystem(HdfsFileSystem):
    """hdfs-native's own, but for the files that it writes."""

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:  # noqa: ANN401 - fsspec's way
        opened = super()._open(path, mode, *args, **options)
        return _Written(opened) if mode == "wb" else opened


def save(state: Mapping[str, object], url: str) -> None:
    """Save a state to a folder in HDFS by ``dcp.save`` with torch's writer for fsspec."""
    where = urlsplit(url)
    writer = FsspecWriter(url)
    # fsspec keeps what it has made, and drops it in forked children, where the client waits for its threads for ever.
    HdfsFileSystem.clear_instance_cache()
    cast("Any", writer.fs).fs = _FileSystem(where.hostname, where.port, skip_instance_cache=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_distributed(dict(state), storage_writer=writer)
