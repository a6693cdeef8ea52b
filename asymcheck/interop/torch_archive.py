"""The zip file that ``torch.save`` writes, and where each storage lies in it by its own directory.

Under ``FakeTensorMode`` torch works out where storages lie from the way its own writer lays files out. Where another
program has packed the file anew, as ``zip`` does, that is wrong, and no error. So torch loads an outline: the pickle as
it is, and empty storages. Where a storage lies in the outline says which record of the file it is.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from asymcheck.errors import ForeignFileError
from asymcheck.interop.zip_members import data_start

_FOLDER = "archive/"
_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_COPIED = (_PICKLE, "version", ".data/version")
# With these torch works out where storages lie; without them it looks.
_LEFT_OUT = (".format_version", ".storage_alignment")
_ENCRYPTED = 1
_FETCH = "fetch or write it again"
_REWRITE = "load it with torch.load() and write it again with torch.save()"
_UNCOMPRESSED = f"pack it again without compression (zip -0), or {_REWRITE}"
_INFLATED_BYTES_MAX: Final = 1 << 28
"""Most bytes of a compressed record that is read whole: no pickle comes near this, for its tensors lie beside it."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Where the bytes of a storage lie."""

    name: str
    """Name of the record, as torch has it."""
    start: int
    """Its first byte in the file."""
    length: int
    """Its bytes."""


class TorchArchive:
    """A file of ``torch.save``, which stays open while this is used."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        """Read all of ``file`` but its storages; ``path`` is its name for messages.

        Raises:
            ForeignFileError: it is of a machine with another byte order, or damaged.
            zipfile.BadZipFile, zlib.error, ValueError: it is damaged.
        """
        self._path = path
        self._file = file
        self._size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as packed:
            members = self._by_name(packed.infolist())
        self._check_byte_order(members)
        content = {name: self._content(name, members[name]) for name in _COPIED if name in members}
        content[_BYTE_ORDER] = sys.byteorder.encode()
        names = [name for name in members | content if name not in _LEFT_OUT]
        self.outline = io.BytesIO()
        """What torch loads in place of the file, faked."""
        with zipfile.ZipFile(self.outline, "w") as outline:
            for name in names:
                outline.writestr(_FOLDER + name, content.get(name, b""))
        starts = (data_start(path, member, self._read_outline) for member in outline.infolist())
        self._members = {
            start: (name, members[name]) for start, name in zip(starts, names, strict=True) if name in members
        }
        self.outline.seek(0)

    def record(self, start: int) -> Record:
        """Return the record that lies in the outline from byte ``start`` on.

        Raises:
            ForeignFileError: its bytes do not lie in the file as they are.
        """
        name, member = self._members[start]
        if member.compress_type != zipfile.ZIP_STORED:
            problem = f"its record {name} is compressed"
            raise ForeignFileError(self._path, problem, _UNCOMPRESSED)
        return self._record(name, member)

    def _record(self, name: str, member: zipfile.ZipInfo) -> Record:
        start = data_start(self._path, member, self._read)
        if start + member.compress_size > self._size:
            raise ForeignFileError(self._path, f"it ends before the end of its record {name}", _FETCH)
        if member.flag_bits & _ENCRYPTED:
            raise ForeignFileError(self._path, f"its record {name} is encrypted", "decrypt it first")
        return Record(name, start, member.compress_size)

    def _by_name(self, members: Sequence[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        """Return the members of the folder that torch looks in, which is that of the first one."""
        if members and min(member.header_offset for member in members):
            # Python looks behind whatever comes before, which here could be another file of torch.
            raise ForeignFileError(self._path, "its directory is not of what it begins with", _FETCH)
        folder = members[0].filename.partition("/")[0] + "/" if members else ""
        inside = [member for member in members if member.filename.startswith(folder) and not member.is_dir()]
        found = {member.filename.removeprefix(folder): member for member in inside}
        # Torch is not particular about capitals.
        if len({name.lower() for name in found}) < len(inside):
            raise ForeignFileError(self._path, "two of its records have one name", _REWRITE)
        if _PICKLE not in found:
            raise ForeignFileError(self._path, f"it has no record {_PICKLE}, so torch.save() did not write it", _FETCH)
        return found

    def _check_byte_order(self, members: dict[str, zipfile.ZipInfo]) -> None:
        """Refuse other machines' files, of which torch swaps the bytes; files that say nothing are little-endian."""
        said = self._content(_BYTE_ORDER, members[_BYTE_ORDER]) if _BYTE_ORDER in members else b"little"
        order = said.decode(errors="replace")
        if order != sys.byteorder:
            problem = f"it says that its byte order is {order!r:.40}, and that of this machine is {sys.byteorder}"
            raise ForeignFileError(self._path, problem, _REWRITE)

    def _content(self, name: str, member: zipfile.ZipInfo) -> bytes:
        # Not by zipfile, which wants checksums: torch can write files without.
        record = self._record(name, member)
        data = self._read(record.start, record.length)
        if member.compress_type == zipfile.ZIP_STORED:
            return data
        if member.compress_type == zipfile.ZIP_DEFLATED:
            return self._inflated(name, member, data)
        raise ForeignFileError(self._path, f"its record {name} is compressed in a way that torch does not read", _FETCH)

    def _inflated(self, name: str, member: zipfile.ZipInfo, data: bytes) -> bytes:
        if member.file_size > _INFLATED_BYTES_MAX:
            problem = f"its record {name} is compressed, and has {member.file_size} bytes without"
            raise ForeignFileError(self._path, problem, _UNCOMPRESSED)
        # The file may come from somebody else: a few bytes can stand for more than there is memory.
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        content = stream.decompress(data, member.file_size + 1)
        if len(content) != member.file_size or not stream.eof:
            raise ForeignFileError(self._path, f"its record {name} is not as long as its directory says", _FETCH)
        return content

    def _read(self, start: int, length: int) -> bytes:
        self._file.seek(start)
        return self._file.read(length)

    def _read_outline(self, start: int, length: int) -> bytes:
        return self.outline.getbuffer()[start : start + length].tobytes()
