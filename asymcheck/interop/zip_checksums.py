"""The checksums of a zip file whose members were filled in after it was written.

Torch does not look at them, but ``unzip`` and Python's ``zipfile`` do (APPNOTE.TXT 4.3.9 and 4.3.12).
"""

from __future__ import annotations

import struct
import zipfile
import zlib

from asymcheck.interop.files import TargetFile

_CHUNK = 8 << 20
_LOCAL = struct.Struct("<4s22xHH")
_CENTRAL = struct.Struct("<4s24xHHH12x")
_CENTRAL_CRC = 16
_DESCRIPTOR = b"PK\x07\x08"


def fill_checksums(file: TargetFile) -> None:
    """Compute the CRC-32 of every member and enter it where the file has none: in its directory and behind the data."""
    with zipfile.ZipFile(file.path) as archive:
        members = archive.infolist()
        place = archive.start_dir
    for member in members:
        _, *lengths = _LOCAL.unpack(file.read(member.header_offset, _LOCAL.size))
        start = member.header_offset + _LOCAL.size + sum(lengths)
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
