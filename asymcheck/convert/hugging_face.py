"""Read and write safetensors files and Hugging Face model folders.

::

    config.json  tokenizer.json  …           small files, which an export copies
    model.safetensors                        all tensors in one file, or
    model-00001-of-00002.safetensors  …      tensors in shards
    model.safetensors.index.json             with an index: {"metadata": {…}, "weight_map": {tensor: shard}}

A folder is untrusted, so files outside of the folder are never read. The only exception are links from
`snapshots/<revision>/` to `blobs` in the cache of the Hugging Face hub.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from asymcheck.convert.export_target import Draft, DraftSink, FileRegion, NewTensor
from asymcheck.convert.part import MODEL, Part, encode_tied
from asymcheck.convert.rename import Renames
from asymcheck.convert.safetensors_format import SafetensorsHeader, encode_header, read_header, shown
from asymcheck.convert.source_file import SourceFile
from asymcheck.errors import ForeignFileError, InvalidInputError, NotFoundError, listed
from asymcheck.format.manifest import TensorRow
from asymcheck.restore.read_plan import ByteTarget
from asymcheck.storage.local_files import translated

SUFFIX: Final = ".safetensors"
SINGLE_NAME: Final = f"model{SUFFIX}"
INDEX_NAME: Final = f"{SINGLE_NAME}.index.json"

OTHER_BYTES_MAX: Final = 100_000_000
"""Maximum size of a small file and of an index, in bytes. The largest tokenizers have about 40 MB."""

_WEIGHT_SUFFIXES = (
    *(SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz", ".ot", ".tflite", ".pkl"),
    ".index.json",
)
_TORCH_SINGLE = "pytorch_model.bin"
_TORCH_SHARD = re.compile(r"pytorch_model(?:-(\d{5})-of-(\d{5}))?\.bin", re.ASCII)
_NAME_BYTES_MAX = 255
_FETCH_AGAIN = "fetch or export the folder again"
# transformers refuses files without this entry.
_FORMAT = {"format": "pt"}
_CONFIGURATION = "config.json"
# Configuration and weights of an adapter, such as a LoRA. peft does not look for model.safetensors.
_ADAPTER_CONFIGURATION = "adapter_config.json"
_ADAPTER_NAME: Final = f"adapter_model{SUFFIX}"
_SHOWN = 4


class Shard(NamedTuple):
    """A file to write."""

    name: str
    tensors: tuple[NewTensor, ...]


def read_folder(folder: Path, opened: Callable[[Path], SourceFile]) -> SafetensorsHeader:
    """Read the headers of a model in the layout of Hugging Face as one; no tensor data is read.

    The weights are the shards in ``model.safetensors.index.json``, else ``model.safetensors``, else the only file that
    ends in ``.safetensors``. If the folder has both an index and a ``model.safetensors`` that the index does not
    describe, the folder is refused, because readers differ in which of the two they load.

    Index and shards must name the same tensors. ``total_size`` in the index is ignored, because many published values
    are wrong and no reader depends on it.

    Raises:
        ForeignFileError: the folder has no such weights, names files outside of the folder, or contradicts itself; or
            a file breaks a rule of its format.
        StorageError: the operating system refused to read the folder.
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
    tensors = tuple(tensor for header in headers.values() for tensor in header.tensors)
    return SafetensorsHeader(tensors, _agreed(header.metadata for header in headers.values()))


def torch_weights(folder: Path) -> tuple[str, ...]:
    """Return the names of all ``pytorch_model*.bin`` files, for folders without safetensors weights.

    Raises:
        ForeignFileError: a shard is missing, or a link leads out of the folder.
    """
    names = _entries(folder)
    shards = {name: match for name in names if (match := _TORCH_SHARD.fullmatch(name))}
    if any(name.endswith(SUFFIX) for name in names) or not shards:
        return ()
    if _TORCH_SINGLE in shards:
        shards = {_TORCH_SINGLE: shards[_TORCH_SINGLE]}
    elif {int(match[1]) for match in shards.values()} != set(range(1, int(next(iter(shards.values()))[2]) + 1)):
        raise ForeignFileError(
            folder, f"some shards of the weights are missing: found {shown([*shards])}", _FETCH_AGAIN
        )
    for name in shards:
        _inside(folder, name)
    return tuple(shards)


def other_files(folder: Path) -> list[str]:
    """Return the names of a folder's small files other than weights; raises the errors of :func:`read_folder`."""
    return [name for name in _entries(folder) if _is_small_other(folder, name)]


def plan_shards(tensors: Sequence[NewTensor], max_shard_bytes: int) -> list[Shard]:
    """Split tensors into files of at most ``max_shard_bytes``, as huggingface_hub does.

    Tensors stay in their order. A tensor that is larger than ``max_shard_bytes`` gets its own file, before the file
    that is being filled. A single file is ``model.safetensors``, and needs no index.
    """
    if max_shard_bytes < 1:
        raise InvalidInputError(f"max_shard_bytes is {max_shard_bytes}; give at least 1 byte")
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
    """Return the content of ``model.safetensors.index.json`` for the shards of :func:`plan_shards`."""
    tensors = [(tensor, shard.name) for shard in shards for tensor in shard.tensors]
    total = sum(tensor.nbytes for tensor, _ in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": {tensor.name: name for tensor, name in tensors}}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _entries(folder: Path) -> list[str]:
    with translated("list", folder):
        return sorted(os.listdir(folder))


def _single_name(folder: Path, names: Sequence[str]) -> str:
    candidates = [name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]
    if SINGLE_NAME in candidates:
        return SINGLE_NAME
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        problem = f"{len(candidates)} files end in {SUFFIX}, but neither {SINGLE_NAME} nor {INDEX_NAME} exists"
        remedy = "give one of the files, or fetch the index"
        raise ForeignFileError(folder, f"{problem}: {shown(candidates)}", remedy)
    remedy = "give a folder with safetensors weights or pytorch_model.bin, or one file, such as a .pt file"
    raise ForeignFileError(folder, f"no file ends in {SUFFIX}", remedy)


def _weight_map(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the file name of the shard of each tensor in the index."""
    path = _inside(folder, INDEX_NAME)
    with SourceFile(path) as file:
        if file.size > OTHER_BYTES_MAX:
            raise ForeignFileError(
                path, f"the index has {file.size} bytes, more than the maximum of {OTHER_BYTES_MAX}", _FETCH_AGAIN
            )
        index = file.read_json(0, file.size, "the index", _FETCH_AGAIN)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ForeignFileError(path, "not a JSON object with a non-empty weight_map", _FETCH_AGAIN)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            problem = f"tensor {shown(tensor)} is in {shown(shard)}, which is not a {SUFFIX} file in this folder"
            raise ForeignFileError(path, problem, "do not use this folder unless you trust its author")
    if SINGLE_NAME in names and set(weight_map.values()) != {SINGLE_NAME}:
        problem = f"the folder also has {SINGLE_NAME}, and readers differ in which of the two they load"
        raise ForeignFileError(path, problem, "remove the wrong one")
    return weight_map


def _is_shard_name(name: str) -> bool:
    """Tell whether a name is a plain file name on every operating system."""
    plain = not any(character in "/\\:" or not character.isprintable() for character in name)
    short = len(name.encode("utf-8")) <= _NAME_BYTES_MAX
    return plain and short and name.endswith(SUFFIX) and not name.startswith(".")


def _inside(folder: Path, name: str) -> Path:
    """Return the path of an entry, and refuse links that lead out of the folder."""
    if not _stays_inside(folder, name):
        raise ForeignFileError(
            folder / name, "a link that leads out of the folder", "replace the link by its file if you trust the folder"
        )
    return folder / name


def _stays_inside(folder: Path, name: str) -> bool:
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    return in_cache or target.is_relative_to(home)


def _shard_header(folder: Path, name: str, opened: Callable[[Path], SourceFile]) -> SafetensorsHeader:
    path = _inside(folder, name)
    try:
        return read_header(opened(path))
    except NotFoundError as error:
        raise ForeignFileError(path, "the weights file is missing", _FETCH_AGAIN) from error


def _check_agreement(folder: Path, weight_map: Mapping[str, str], headers: Mapping[str, SafetensorsHeader]) -> None:
    shard_of: dict[str, str] = {}
    for shard, header in headers.items():
        for tensor in header.tensors:
            first = shard_of.setdefault(tensor.name, shard)
            if first != shard:
                raise ForeignFileError(
                    folder, f"tensor {shown(tensor.name)} is in {first} and in {shard}", _FETCH_AGAIN
                )
    for name in {**shard_of, **weight_map}:
        indexed, stored = (places.get(name, "no shard") for places in (weight_map, shard_of))
        if indexed != stored:
            problem = f"tensor {shown(name)} is in {stored}, but in {indexed} according to the index"
            remedy = f"{_FETCH_AGAIN}, with index and shards from the same export"
            raise ForeignFileError(folder / INDEX_NAME, problem, remedy)


def _is_small_name(name: str) -> bool:
    """Tell whether a name may be that of a small file: neither hidden nor that of weights, which may be pickles."""
    return name != "" and not name.startswith(".") and not name.endswith(_WEIGHT_SUFFIXES)


def _is_small_other(folder: Path, name: str) -> bool:
    if not (_is_small_name(name) and _stays_inside(folder, name)):
        return False
    try:
        status = (folder / name).stat()
    except OSError:
        # The entry is a dangling link, or was removed after it was listed.
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= OTHER_BYTES_MAX


def _agreed(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries on which all files that have the key agree."""
    merged: dict[str, set[str]] = {}
    for part in metadata:
        for key, value in part.items():
            merged.setdefault(key, set()).add(value)
    return {key: value for key, (value, *rest) in sorted(merged.items()) if not rest}


class SafetensorsSink(DraftSink):
    """Sink that writes tensors to safetensors files, and lists plain values in :attr:`left_out`."""

    def __init__(
        self,
        draft: Draft,
        part: str | None,
        *,
        max_shard_bytes: int | None,
        files: Sequence[Path] = (),
        renames: Renames = (),
    ) -> None:
        """Write the tensors of a part to ``draft``.

        A file of a folder has at most ``max_shard_bytes`` of tensors; None means a single file. ``files`` are copied
        into the folder, and replace small files of the checkpoint.
        """
        super().__init__(draft, part, renames)
        self._max_shard_bytes = max_shard_bytes
        self._files = files

    def begin(self, shape: object, tensors: Mapping[int, TensorRow]) -> Mapping[int, ByteTarget]:
        """Write headers, index and small files; return the regions of the tensors."""
        part = self._picked(shape, tensors_only=True)
        rows, tied = part.rows_by_name()
        self.left_out = part.plain_names()
        self.hints += self._hints(part)
        self.tensors = [NewTensor.of(name, tensors[row]) for name, row in rows.items()]
        metadata = {**_FORMAT, **part.metadata, **encode_tied(tied)}
        targets: dict[int, ByteTarget] = {}
        if self._max_shard_bytes is not None:
            for name in part.files:
                if "/" in name or "\0" in name or not _is_small_name(name):
                    raise InvalidInputError(
                        f"cannot export file {name!r:.100} of the checkpoint: the name is not that of a small file in "
                        "a model folder, such as config.json; write a .safetensors or .pt file"
                    )
            self._draft.check_kept(self._small_file_names(part))
        if self._draft.is_dry_run:
            encode_header(self.tensors, metadata)  # checks names and dtypes
            return {}
        for shard in self._shards(part):
            header, starts = encode_header(shard.tensors, metadata)
            size = len(header) + sum(tensor.nbytes for tensor in shard.tensors)
            file = self._draft.file(shard.name, size)
            file.write(0, header)
            for tensor, start in zip(shard.tensors, starts, strict=True):
                targets[rows[tensor.name]] = FileRegion(file, start)
        if self._max_shard_bytes is not None:
            targets.update(self._write_small_files(part, tensors))
        return targets

    def _shards(self, part: Part) -> list[Shard]:
        if self._max_shard_bytes is None:
            return [Shard("", tuple(self.tensors))]
        if self._is_adapter(part):
            return [Shard(_ADAPTER_NAME, tuple(self.tensors))]
        shards = plan_shards(self.tensors, self._max_shard_bytes)
        if len(shards) > 1:
            index = encode_index(shards)
            self._draft.file(INDEX_NAME, len(index)).write(0, index)
        return shards

    def _small_file_names(self, part: Part) -> set[str]:
        return {*part.files, *(path.name for path in self._files)}

    def _is_adapter(self, part: Part) -> bool:
        names = self._small_file_names(part)
        return _ADAPTER_CONFIGURATION in names and _CONFIGURATION not in names

    def _hints(self, part: Part) -> list[str]:
        hints = []
        if keys := part.top_keys:
            names = listed([f"{key}." for key in keys], _SHOWN)
            suggested = MODEL if MODEL in keys else keys[0]
            hints.append(
                f"tensor names in {self._draft.target} begin with {names}, which other programs do not expect; pass "
                f"--part {suggested} to write only {suggested}, without this prefix"
            )
        has_configuration = _CONFIGURATION in self._small_file_names(part) or self._is_adapter(part)
        if self._max_shard_bytes is not None and not has_configuration:
            hints.append(
                f"{self._draft.target} has no {_CONFIGURATION}, which transformers requires; copy it from another "
                "model folder with asymcheck restore --files-from FOLDER"
            )
        return hints

    def _write_small_files(self, part: Part, tensors: Mapping[int, TensorRow]) -> dict[int, ByteTarget]:
        given = {path.name for path in self._files}
        for path in self._files:
            with translated("read", path):
                data = path.read_bytes()
            self._draft.file(path.name, len(data)).write(0, data)
        return {
            ref.row: FileRegion(self._draft.file(name, tensors[ref.row].nbytes), 0)
            for name, ref in part.files.items()
            if name not in given
        }
