"""Checkpoints to and from files of other formats."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from asymcheck.config import DEFAULT_RUN
from asymcheck.convert.dcp_folder import is_dcp_folder, read_dcp_folder
from asymcheck.convert.deepspeed_folder import is_deepspeed_folder, read_deepspeed_folder
from asymcheck.convert.export_target import Draft, check_target, format_of
from asymcheck.convert.hugging_face import SafetensorsSink, other_files, read_folder
from asymcheck.convert.part import MODEL, SOURCE, TIED, leaves_of
from asymcheck.convert.safetensors_format import FileTensor, read_header
from asymcheck.convert.source_file import SourceFile, refused
from asymcheck.convert.torch_file import TorchSink, read_torch_file
from asymcheck.errors import ForeignFileError, InvalidInputError, NotFoundError, UnsupportedValueError
from asymcheck.state.leaves import TensorBytes
from asymcheck.state.walk import flatten
from asymcheck.storage.local_files import translated
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Progress

SHARD_BYTES = 5_000_000_000  # most bytes of tensors in one file of a folder, as transformers has it by default
_REMEDY = "load it in a program of your own, and store what that gives with Store.save()"


@dataclasses.dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    format: str  # ``safetensors``, ``folder`` or ``torch``
    checkpoint: Checkpoint
    tensors: int  # tied ones count once
    nbytes: int
    left_out: tuple[str, ...]  # names of values that the format has no place for
    skipped: tuple[str, ...]  # newer checkpoints that were passed over, with the reasons
    hints: tuple[str, ...]  # reasons why other programs may not read it as expected, and remedies


@dataclasses.dataclass(frozen=True)
class Output:
    """The target of an export."""

    path: Path  # ``*.safetensors``, ``*.pt`` (``.pth``, ``.bin``), or a folder in the layout of Hugging Face
    overwrite: bool = False
    max_shard_bytes: int = SHARD_BYTES  # most bytes of tensors in one file of a folder
    files_from: Path | None = None  # A folder whose small files (configuration, tokenizer) are copied into the new one

    def sink(self, part: str | None) -> SafetensorsSink | TorchSink:
        """Return the sink that writes a part of a state, given by its dotted name; None means the whole state."""
        kind = check_target(self.path)
        if self.files_from is not None and kind != "folder":
            raise InvalidInputError(
                f"{self.path} is one file, so there is no place beside it for the files of {self.files_from}"
            )
        draft = Draft(self.path, overwrite=self.overwrite)
        if kind == "torch":
            return TorchSink(draft, part)
        files = () if self.files_from is None else [self.files_from / name for name in other_files(self.files_from)]
        shard_bytes = self.max_shard_bytes if kind == "folder" else None
        return SafetensorsSink(draft, part, max_shard_bytes=shard_bytes, files=files)


def export_checkpoint(  # noqa: PLR0913 - each says something else of what is read
    store: Store,
    output: Output,
    *,
    step: int | str | None = None,
    run: str = DEFAULT_RUN,
    part: str | None = None,
    tensors: str = "*",
    rank: int | None = None,
    ring_folder: Path | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write a checkpoint to a file or folder, every byte verified, in bounded memory.

    Args:
        store: the store with the checkpoint.
        output: the target.
        step: a step or ``save:DIGITS``; by default the newest consistent checkpoint.
        run: the run of the checkpoint.
        part: dotted name of a part of the state, for instance ``model``; names of tensors are relative to it.
        tensors: a glob of names in the whole state.
        rank: export only the shards of this rank; by default, whole tensors of all ranks.
        ring_folder: read only what killed processes left complete in the rings of this folder.
        progress: called with the bytes that are done and the bytes of all tensors.

    Raises:
        InvalidInputError: the path is taken, the part does not exist, or the format lacks a dtype. Nothing was written.
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`Store.load`.
        LockTimeoutError: a ring is in use.
        OutOfSpaceError: the disk has too little room; nothing was written.
    """
    sink = output.sink(part)
    if ring_folder is None:
        restored = store.stream(sink, step, tensors=tensors, run=run, rank=rank, progress=progress)
    else:
        restored = store.stream_from_memory(
            sink, step, tensors=tensors, run=run, ring_folder=ring_folder, progress=progress
        )
    return Exported(
        path=output.path,
        format=format_of(output.path),
        checkpoint=restored.checkpoint,
        tensors=sink.tensors,
        nbytes=sink.nbytes,
        left_out=tuple(sink.left_out),
        skipped=restored.skipped,
        hints=tuple(sink.hints),
    )


class _Meter:
    """Counts the bytes that are read, for a progress bar."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self.total = 0

    def add(self, count: int) -> None:
        # Reads before the total is known are headers. The count is not exact when several threads read.
        self._done += count if self.total else 0
        if self._progress is not None and self.total:
            self._progress(min(self._done, self.total), self.total)


@contextlib.contextmanager
def foreign_state(path: Path, progress: Progress | None = None, left_out: list[str] | None = None) -> Iterator[object]:
    """Yield the content of a file of another format as a state, whose tensors are read while it is saved.

    A torch file or a folder of torch's DCP keeps its structure. In a folder of DeepSpeed, the fp32 weights, the other
    tensors of the module and the state of the optimizer are assembled to whole tensors. The tensors of a safetensors
    file or a Hugging Face folder go under ``model``. Metadata and the small files of the folder go under
    ``safetensors``, so that :func:`export_checkpoint` can restore them. Names of other files are added to ``left_out``.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: its format is unknown.
        ForeignFileError: the file breaks the rules of its format, or holds values that cannot be stored. Reading a
            tensor raises it, too, when somebody writes to the file meanwhile.
    """
    kind = _kind_of(path)
    meter = _Meter(progress)
    files: dict[Path, SourceFile] = {}
    with contextlib.ExitStack() as stack:

        def opened(name: Path) -> SourceFile:
            if name not in files:
                files[name] = stack.enter_context(SourceFile(name, meter.add))
            return files[name]

        if kind == "dcp":
            state = read_dcp_folder(path, opened)
        elif kind == "deepspeed":
            state = read_deepspeed_folder(path, opened)
        elif kind == "folder":
            folder = read_folder(path, opened)
            if left_out is not None:
                left_out += folder.ignored
            small = {name: opened(path / name) for name in folder.others}
            beside = {name: file.tensor(0, "uint8", (file.size,)) for name, file in small.items()}
            state = _state_of(path, folder.tensors, folder.metadata, beside, opened)
        elif kind == "safetensors":
            header = read_header(path, opened(path))
            state = _state_of(path, header.tensors, header.metadata, {}, opened)
        elif kind == "torch":
            state = read_torch_file(opened(path))
        else:
            raise InvalidInputError(f"{path}: give a .safetensors, .pt, .pth or .bin file, or a folder")
        distinct = {id(leaf): leaf for _, leaf in leaves_of(state) if isinstance(leaf, TensorBytes)}
        meter.total = sum(leaf.nbytes for leaf in distinct.values())
        for file in files.values():
            file.check()
        # Before the save, because the caller may make a store for it first.
        with refused(path, str, _REMEDY, UnsupportedValueError):
            flatten(state)
        yield state


def _kind_of(path: Path) -> str:
    """Return one of the formats of :func:`format_of`, ``dcp`` or ``deepspeed``."""
    with translated("look at", path):
        if not path.exists():
            raise NotFoundError(f"{path} does not exist")
        if is_dcp_folder(path):
            return "dcp"
        if is_deepspeed_folder(path):
            return "deepspeed"
        # An existing folder is a folder, whatever its suffix.
        return "folder" if path.is_dir() else format_of(path)


def import_checkpoint(store: Store, path: Path, *, step: int = 0, run: str = DEFAULT_RUN) -> Checkpoint:
    """Save the content of a file of another format, in bounded memory; see :func:`foreign_state`."""
    with foreign_state(path) as state:
        return store.save(state, step=step, run=run)


def _state_of(
    path: Path,
    tensors: tuple[FileTensor, ...],
    metadata: Mapping[str, str],
    files: Mapping[str, TensorBytes],
    opened: Callable[[Path], SourceFile],
) -> object:
    sources = {name: opened(name) for name in sorted({tensor.path for tensor in tensors})}
    model = {item.name: sources[item.path].tensor(item.start, item.dtype, item.shape) for item in tensors}
    for name, first in _tied(path, metadata, model).items():
        model[name] = model[first]
    kept = {key: value for key, value in metadata.items() if key != TIED}
    return {MODEL: model, SOURCE: {"metadata": kept, "files": dict(files)}}


def _tied(path: Path, metadata: Mapping[str, str], model: Mapping[str, TensorBytes]) -> dict[str, str]:
    """Return further names of tied tensors, with their first names, from the metadata of an export."""
    try:
        tied = json.loads(metadata.get(TIED, "{}"))
    except (ValueError, RecursionError):
        tied = None
    if not isinstance(tied, dict) or not all(
        isinstance(first, str) and first in model and name not in model for name, first in tied.items()
    ):
        problem = f"the metadata entry {TIED} names tensors that are not in the file, or are there already"
        raise ForeignFileError(path, problem, "remove the entry, or export the file again")
    return tied
