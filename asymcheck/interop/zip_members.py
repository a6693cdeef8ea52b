"""Members of a zip file: where their bytes lie, and the checksums of those that were filled in after it was written.

Torch does not look at the checksums, but ``unzip`` and Python's ``zipfile`` do (APPNOTE.TXT 4.3.9 and 4.3.12).
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from asymcheck.errors import ForeignFileError
from asymcheck.interop.files import TargetFile

MAGIC = b"PK\x03\x04"
"""How every member begins, and so a zip file."""

_CHUNK = 8 << 20
_LOCAL = struct.Struct("<4s22xHH")
_CENTRAL = struct.Struct("<4s24xHHH12x")
_CENTRAL_CRC = 16
_DESCRIPTOR = b"PK\x07\x08"


def data_start(path: Path, member: zipfile.ZipInfo, read: Callable[[int, int], bytes]) -> int:
    """Return where the bytes of a member begin: only the header before them says how long that is itself.

    ``read(start, length)`` reads the zip file, whose name for messages is ``path``.

    Raises:
        ForeignFileError: there is no such header.
    """
    header = read(member.header_offset, _LOCAL.size)
    if len(header) < _LOCAL.size or not header.startswith(MAGIC):
        problem = f"{member.filename} does not lie where the directory of the zip file says"
        raise ForeignFileError(path, problem, "fetch or write it again")
    _, name, extra = _LOCAL.unpack(header)
    return int(member.header_offset + _LOCAL.size + name + extra)


def fill_checksums(file: TargetFile) -> None:
    """Compute the CRC-32 of every member and enter it where the file has none: in its directory and behind the data."""
    with zipfile.ZipFile(file.path) as archive:
        members = archive.infolist()
        place = archive.start_dir
    for member in members:
        start = data_start(file.path, member, file.read)
        if member.CRC == 0 and member.file_size:
            checksum = struct.pack("<I", _checksum(file, start, member.file_size))
            file.write(place + _CENTRAL_CRC, checksum)
            if file.read(start + member.file_size, 4) == _DESCRIPTOR:
                file.write(start + member.file_size + 4, checksum)
        _, name, extra, comment = _CENTRAL.unpack(file.read(place, _CENTRAL.size))
        place += _CENTRAL.size + name + extra + comment


def _checksum(file: TargetFile, start: int, length: int) -> int:
    value = 0
    for offset in range(0, length, _CHUNK):
        value = zlib.crc32(file.read(start + offset, min(_CHUNK, length - offset)), value)
    return value
