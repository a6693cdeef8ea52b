"""Safetensors files and folders in the layout of Hugging Face models: read, and written while a checkpoint is read.

::

    config.json  tokenizer.json  …           small files, which an export takes along
    model.safetensors                        either all tensors in one file
    model-00001-of-00002.safetensors  …      or in shards
    model.safetensors.index.json             and the index: {"metadata": {…}, "weight_map": {tensor: shard}}

A folder may come from anywhere, so nothing that it names is read outside of it. Links may lead to only one other
place: `blobs` of the hub's cache, where `snapshots/<revision>/` consists of nothing but such links.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from asymcheck.convert.export_target import Draft, DraftSink
from asymcheck.convert.part import MODEL, Part, encode_tied, pick
from asymcheck.convert.safetensors_format import (
    FileTensor,
    NewTensor,
    SafetensorsHeader,
    encode_header,
    read_header,
    shown,
)
from asymcheck.convert.source_file import SourceFile
from asymcheck.errors import ForeignFileError, InvalidInputError, NotFoundError, StorageError, StructureError
from asymcheck.format.record import parse_json
from asymcheck.restore.read_plan import ByteTarget
from asymcheck.restore.tensor_stream import CheckpointOutline
from asymcheck.storage.local_files import translated

SUFFIX: Final = ".safetensors"
SINGLE_NAME: Final = f"model{SUFFIX}"
INDEX_NAME: Final = f"{SINGLE_NAME}.index.json"

OTHER_BYTES_MAX: Final = 100_000_000
"""The largest file that counts as a small one; the largest tokenizers have about 40 MB. Also the longest index."""

_WEIGHT_SUFFIXES = (
    *(SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz", ".ot", ".tflite", ".pkl"),
    ".index.json",
)
_NAME_BYTES_MAX = 255
_FETCH_AGAIN = "fetch or export the folder again"
# transformers requires this entry in every file that it reads.
_FORMAT = {"format": "pt"}
_CONFIGURATION = "config.json"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The content of a folder."""

    tensors: tuple[FileTensor, ...]  # by name of the file, then in the order of their bytes
    metadata: dict[str, str]  # metadata of the files, as far as the files that have a key agree on its value
    others: tuple[str, ...]  # names of small files that are no weights: configuration, tokenizer, licence, code
    ignored: tuple[str, ...]
    """Names of all other entries: weights not read, sub-folders, hidden or large files, links that lead outside."""


class Shard(NamedTuple):
    """A file to be written."""

    name: str
    tensors: tuple[NewTensor, ...]


def read_folder(folder: Path, opened: Callable[[Path], SourceFile] | None = None) -> ModelFolder:
    """Read the headers of a model in the layout of Hugging Face; no tensor data is read.

    ``opened`` opens the weights for a caller who will read the tensors from the same files.

    The weights are those of ``model.safetensors.index.json``, else ``model.safetensors``, else the only file that ends
    in ``.safetensors``. A folder with both of the first two is refused, unless the index describes that one file,
    because readers differ in which of them they load.

    Index and shards must agree in both directions. A tensor of a shard that is missing in the index is refused too:
    some readers would load it and others not. ``total_size`` in the index is ignored, because many published ones are
    wrong and no reader depends on it.

    Raises:
        ForeignFileError: the folder has no such weights, names files outside of it, or contradicts itself; or one of
            its files breaks a rule of its format.
        NotFoundError: the folder does not exist.
        StorageError: the operating system refused to read it.
    """
    names = _entries(folder)
    if INDEX_NAME in names:
        weight_map = _weight_map(folder, names)
        shards = sorted(set(weight_map.values()))
        headers = {shard: _shard_header(folder, shard, opened) for shard in shards}
        _check_agreement(folder, weight_map, headers)
    else:
        single = _single_name(folder, names)
        headers = {single: _shard_header(folder, single, opened)}
    others = [name for name in names if name not in headers and _is_small_other(folder, name)]
    ignored = [name for name in names if name not in headers and name not in others and name != INDEX_NAME]
    tensors = tuple(tensor for header in headers.values() for tensor in header.tensors)
    return ModelFolder(tensors, _agreed(header.metadata for header in headers.values()), tuple(others), tuple(ignored))


def other_files(folder: Path) -> list[str]:
    """Return the names of a folder's small files that are no weights; raises what :func:`read_folder` raises."""
    return [name for name in _entries(folder) if _is_small_other(folder, name)]


def plan_shards(tensors: Sequence[NewTensor], max_shard_bytes: int) -> list[Shard]:
    """Return the files to write, at most ``max_shard_bytes`` of tensors in each, as huggingface_hub cuts them.

    Tensors stay in their order. A tensor that is larger than ``max_shard_bytes`` gets a file of its own, before the one
    that is being filled. A single file is ``model.safetensors``, and needs no index.
    """
    if max_shard_bytes < 1:
        raise InvalidInputError(f"shards of {max_shard_bytes} bytes hold nothing; give at least 1")
    filled: list[list[NewTensor]] = []
    current: list[NewTensor] = []
    room = max_shard_bytes
    for tensor in tensors:
        if tensor.nbytes > max_shard_bytes:
            filled.append([tensor])
            continue
        if tensor.nbytes > room:
            filled.append(current)
            current, room = [], max_shard_bytes
        current.append(tensor)
        room -= tensor.nbytes
    if current or not filled:
        filled.append(current)
    if len(filled) == 1:
        return [Shard(SINGLE_NAME, tuple(filled[0]))]
    count = len(filled)
    return [Shard(f"model-{i:05d}-of-{count:05d}{SUFFIX}", tuple(part)) for i, part in enumerate(filled, start=1)]


def encode_index(shards: Sequence[Shard]) -> bytes:
    """Return the text of ``model.safetensors.index.json`` for the shards of :func:`plan_shards`."""
    tensors = [(tensor, shard.name) for shard in shards for tensor in shard.tensors]
    total = sum(tensor.nbytes for tensor, _ in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": {tensor.name: name for tensor, name in tensors}}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder}: there is no such folder; check the path") from error
    except NotADirectoryError as error:
        raise ForeignFileError(folder, "a file, not a folder", "give the folder that holds it") from error
    except OSError as error:
        raise StorageError(f"cannot list {folder}: {error.strerror}; check its permissions and the device") from error


def _single_name(folder: Path, names: Sequence[str]) -> str:
    """Return the file with all weights of a folder that has no index."""
    found = [name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    if SINGLE_NAME in found:
        return SINGLE_NAME
    if len(found) == 1:
        return found[0]
    if found:
        what = f"{len(found)} files end in {SUFFIX}, none is {SINGLE_NAME}, and there is no {INDEX_NAME}"
        raise ForeignFileError(folder, f"{what}: {shown(found)}", "give the one that is meant, or fetch the index too")
    remedy = "give a folder with safetensors weights; convert others, such as pytorch_model.bin, with their own tools"
    raise ForeignFileError(folder, f"no file ends in {SUFFIX}", remedy)


def _weight_map(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the name of the shard, a plain file name, of each tensor in the index."""
    path = _inside(folder, INDEX_NAME)
    with SourceFile(path) as file:
        if file.size > OTHER_BYTES_MAX:
            raise ForeignFileError(path, f"{file.size} bytes, an index has at most {OTHER_BYTES_MAX}", _FETCH_AGAIN)
        text = file.read_bytes(0, file.size)
    try:
        index = parse_json(text, "the index")
    except StructureError as error:
        # Not chained, because the cause would keep the whole text in memory.
        raise ForeignFileError(path, str(error), _FETCH_AGAIN) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ForeignFileError(path, "no JSON object with a weight_map that names tensors", _FETCH_AGAIN)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            what = f"tensor {shown(tensor)} lies in {shown(shard)}, which is no name of a {SUFFIX} file in this folder"
            raise ForeignFileError(path, what, "do not trust this folder before you know who wrote that")
    if SINGLE_NAME in names and set(weight_map.values()) != {SINGLE_NAME}:
        what = f"there is {SINGLE_NAME} too, and readers differ in which of the two they load"
        raise ForeignFileError(path, what, "remove the one that is not meant")
    return weight_map


def _is_shard_name(name: str) -> bool:
    """Tell whether a name can only mean a file of the folder itself, on any system."""
    plain = not any(character in "/\\:" or not character.isprintable() for character in name)
    short = len(name.encode("utf-8")) <= _NAME_BYTES_MAX
    return plain and short and name.endswith(SUFFIX) and not name.startswith(".")


def _inside(folder: Path, name: str) -> Path:
    """Return the path of an entry of the folder, whose links must not lead out of it."""
    if not _stays_inside(folder, name):
        what = "a link that leads out of the folder"
        raise ForeignFileError(folder / name, what, "put the file itself there, if you know what it links to")
    return folder / name


def _stays_inside(folder: Path, name: str) -> bool:
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    return in_cache or target.is_relative_to(home)


def _shard_header(folder: Path, name: str, opened: Callable[[Path], SourceFile] | None) -> SafetensorsHeader:
    path = _inside(folder, name)
    try:
        return read_header(path, None if opened is None else opened(path))
    except NotFoundError as error:
        # The folder exists, but names a file that it does not have.
        raise ForeignFileError(path, "a file of weights that is missing", _FETCH_AGAIN) from error


def _check_agreement(folder: Path, weight_map: Mapping[str, str], headers: Mapping[str, SafetensorsHeader]) -> None:
    """Check that index and shards name the same tensors in the same places."""
    found: dict[str, str] = {}
    for shard, header in headers.items():
        for tensor in header.tensors:
            first = found.setdefault(tensor.name, shard)
            if first != shard:
                what = f"tensor {shown(tensor.name)} is in {first} and in {shard}"
                raise ForeignFileError(folder, what, _FETCH_AGAIN)
    index = folder / INDEX_NAME
    remedy = f"{_FETCH_AGAIN}, index and shards from the same export"
    for name, shard in found.items():
        if name not in weight_map:
            raise ForeignFileError(index, f"tensor {shown(name)} of {shard} is not in the index", remedy)
    for name, shard in weight_map.items():
        if found.get(name) != shard:
            where = f"in {found[name]}" if name in found else "nowhere"
            raise ForeignFileError(index, f"tensor {shown(name)} is not in {shard}, but {where}", remedy)


def _is_small_other(folder: Path, name: str) -> bool:
    if name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES) or not _stays_inside(folder, name):
        return False
    try:
        status = (folder / name).stat()
    except OSError:
        # A link to nowhere, or a file that was removed after it was listed.
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= OTHER_BYTES_MAX


def _agreed(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    merged: dict[str, set[str]] = {}
    for part in metadata:
        for key, value in part.items():
            merged.setdefault(key, set()).add(value)
    return {key: value for key, (value, *rest) in sorted(merged.items()) if not rest}


class SafetensorsSink(DraftSink):
    """Writes the tensors of a checkpoint, or of a part; other values are listed in :attr:`left_out`."""

    def __init__(
        self, draft: Draft, part: str | None, *, max_shard_bytes: int | None, files: Sequence[Path] = ()
    ) -> None:
        """Write to ``draft`` the tensors of the part with this dotted name; None means the whole state.

        ``max_shard_bytes`` is None for a single file; for a folder, it limits the tensors in one file. ``files`` are
        copied into the folder; they replace those of the checkpoint.
        """
        super().__init__(draft, part)
        self._max_shard_bytes = max_shard_bytes
        self._files = files

    def begin(self, outline: CheckpointOutline) -> Mapping[int, ByteTarget]:
        """Write headers, index and small files; return the places of the tensors."""
        part = pick(outline.shape, self._part, tensors_only=True)
        rows, tied = part.rows_by_name()
        self.left_out = part.plain_names()
        self.hints = self._hints(part)
        stored = {name: outline.tensors[row] for name, row in rows.items()}
        tensors = [NewTensor(name, tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in stored.items()]
        self.tensors, self.nbytes = len(tensors), sum(tensor.nbytes for tensor in tensors)
        metadata = {**_FORMAT, **part.metadata, **encode_tied(tied)}
        targets: dict[int, ByteTarget] = {}
        if self._max_shard_bytes is not None:
            self._draft.check_kept(self._names_beside(part))
        for shard in self._shards(tensors):
            header, starts = encode_header(shard.tensors, metadata)
            size = len(header) + sum(tensor.nbytes for tensor in shard.tensors)
            file = self._draft.file(shard.name, size)
            file.write(0, header)
            for tensor, start in zip(shard.tensors, starts, strict=True):
                targets[rows[tensor.name]] = file.region(stored[tensor.name], start)
        if self._max_shard_bytes is not None:
            targets.update(self._beside(part, outline))
        return targets

    def _shards(self, tensors: Sequence[NewTensor]) -> list[Shard]:
        if self._max_shard_bytes is None:
            return [Shard("", tuple(tensors))]
        shards = plan_shards(tensors, self._max_shard_bytes)
        if len(shards) > 1:
            index = encode_index(shards)
            self._draft.file(INDEX_NAME, len(index)).write(0, index)
        return shards

    def _names_beside(self, part: Part) -> set[str]:
        return {*part.files, *(path.name for path in self._files)}

    def _hints(self, part: Part) -> list[str]:
        hints = []
        if part.tops:
            listed = ", ".join(f"{top}." for top in part.tops[:_SHOWN]) + (" …" if len(part.tops) > _SHOWN else "")
            chosen = MODEL if MODEL in part.tops else part.tops[0]
            hints.append(
                f"names of tensors in {self._draft.target} begin with {listed}; --part {chosen} writes what lies under "
                f"{chosen}, by the names that it has there"
            )
        if self._max_shard_bytes is not None and _CONFIGURATION not in self._names_beside(part):
            hints.append(
                f"{self._draft.target} has no {_CONFIGURATION}, without which transformers does not load it; "
                "asymcheck restore --files-from FOLDER takes along that of another model folder"
            )
        return hints

    def _beside(self, part: Part, outline: CheckpointOutline) -> dict[int, ByteTarget]:
        given = {path.name for path in self._files}
        for path in self._files:
            with translated("read", path):
                data = path.read_bytes()
            self._draft.file(path.name, len(data)).write(0, data)
        return {
            ref.row: self._draft.file(name, outline.tensors[ref.row].nbytes).region(outline.tensors[ref.row], 0)
            for name, ref in part.files.items()
            if name not in given
        }
