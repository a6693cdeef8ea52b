"""Export checkpoints to files of other formats, and import such files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from asymcheck.config import DEFAULT_RUN
from asymcheck.convert.dcp_folder import is_dcp_folder, read_dcp_folder
from asymcheck.convert.deepspeed_folder import is_deepspeed_folder, read_deepspeed_folder
from asymcheck.convert.export_target import Draft, NewTensor, check_target, format_of
from asymcheck.convert.hugging_face import INDEX_NAME, SafetensorsSink, other_files, read_folder, torch_weights
from asymcheck.convert.part import MODEL, SOURCE, TIED, keep_parts, leaves_of, overlaps
from asymcheck.convert.rename import Renames, rename_tensors
from asymcheck.convert.safetensors_format import SafetensorsHeader, read_header
from asymcheck.convert.source_file import SourceFile, refused
from asymcheck.convert.torch_file import TORCH_MARKS, read_torch_file
from asymcheck.convert.torch_sink import TorchSink
from asymcheck.errors import ForeignFileError, InvalidInputError, NotFoundError, UnsupportedValueError
from asymcheck.restore.ring_stream import stream_from_rings
from asymcheck.restore.tensor_stream import stream
from asymcheck.state.leaves import TensorBytes
from asymcheck.state.walk import flatten
from asymcheck.storage.local_files import translated
from asymcheck.store import Store
from asymcheck.types import Checkpoint, Progress, ProgressMeter
from asymcheck.validation import check_rank

SHARD_BYTES = 5_000_000_000  # default maximum of tensor bytes in one file of a model folder, as in transformers
_HEAD_BYTES = 9
_INDEXES = (INDEX_NAME, ".metadata", "latest", "zero_to_fp32.py", "zero_to_torch.py")
"""Files that name or assemble the others: of Hugging Face, DCP and DeepSpeed."""
_REMEDY = "load the file in your own program, and save the result with Store.save()"


@dataclasses.dataclass(frozen=True)
class Exported:
    """Result of an export."""

    path: Path
    format: str  # ``safetensors``, ``folder`` or ``torch``
    checkpoint: Checkpoint
    tensors: int  # tied tensors count once
    nbytes: int
    left_out: tuple[str, ...]  # names of plain values that the format cannot store
    skipped: tuple[str, ...]  # newer checkpoints that were skipped, with reasons
    hints: tuple[str, ...]  # reasons why other programs may not read the output as expected, with remedies


@dataclasses.dataclass(frozen=True)
class Planned:
    """Result of a dry run, which writes nothing."""

    path: Path  # target
    run: str
    step: int
    nbytes: int
    tensors: tuple[NewTensor, ...]


@dataclasses.dataclass(frozen=True)
class PlannedExport(Exported):
    """Result of the dry run of an export."""

    planned: Planned


@dataclasses.dataclass(frozen=True)
class Output:
    """Target of an export."""

    path: Path  # ``*.safetensors``, ``*.pt`` (``.pth``, ``.bin``), or a folder in the layout of Hugging Face
    overwrite: bool = False
    max_shard_bytes: int = SHARD_BYTES  # maximum of tensor bytes in one file of a folder
    files_from: Path | None = None  # model folder whose small files (configuration, tokenizer) are copied
    renames: Renames = ()  # changes of tensor names
    is_dry_run: bool = False  # check everything, but write nothing

    def sink(self, part: str | None) -> SafetensorsSink | TorchSink:
        """Return the sink that writes the part with this dotted name; None means the whole state."""
        kind = check_target(self.path)
        if self.files_from is not None and kind != "folder":
            raise InvalidInputError(
                f"cannot copy files from {self.files_from}: target {self.path} is a single file; give a folder"
            )
        draft = Draft(self.path, overwrite=self.overwrite, is_dry_run=self.is_dry_run)
        if kind == "torch":
            return TorchSink(draft, part, self.renames)
        files = () if self.files_from is None else [self.files_from / name for name in other_files(self.files_from)]
        shard_bytes = self.max_shard_bytes if kind == "folder" else None
        return SafetensorsSink(draft, part, max_shard_bytes=shard_bytes, files=files, renames=self.renames)


def export_checkpoint(  # noqa: PLR0913 - options of the command
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
    """Write a checkpoint to a file or folder in bounded memory, and verify every byte.

    Args:
        store: the store with the checkpoint.
        output: the target.
        step: a step, ``save:DIGITS`` or ``best:METRIC``; by default the newest consistent checkpoint.
        run: the run of the checkpoint.
        part: dotted name of a part of the state, for example ``model``; tensor names are relative to the part.
        tensors: a glob of names in the whole state.
        rank: export only the shards of this rank; by default, whole tensors of all ranks.
        ring_folder: read only complete captures of killed processes from the rings in this folder.
        progress: callback with the bytes done and the bytes of all tensors.

    Raises:
        InvalidInputError: the path exists, the part does not exist, or the format lacks a dtype. Nothing was written.
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`Store.load`.
        LockTimeoutError: a ring is in use.
        OutOfSpaceError: the disk has too little free space; nothing was written.
    """
    sink = output.sink(part)
    step, rank = store.resources.checked(run, step, tensors), check_rank(rank)
    if ring_folder is None:
        restored = store.resources.read(
            lambda source: stream(source, run, step, tensors, sink, progress, rank=rank), is_newest=step is None
        )
    else:
        loaded = stream_from_rings(store.resources.tier, ring_folder, run, step, tensors, sink, progress)
        restored = store.resources.restored(loaded, store.resources.tier, is_newest=False)
    done = Exported(
        path=output.path,
        format=format_of(output.path),
        checkpoint=restored.checkpoint,
        tensors=len(sink.tensors),
        nbytes=sum(tensor.nbytes for tensor in sink.tensors),
        left_out=tuple(sink.left_out),
        skipped=restored.skipped,
        hints=tuple(sink.hints),
    )
    if not output.is_dry_run:
        return done
    planned = Planned(done.path, done.checkpoint.run, done.checkpoint.step, done.nbytes, tuple(sink.tensors))
    return PlannedExport(**vars(done), planned=planned)


def plan_import(state: object, path: Path, *, step: int, run: str) -> Planned:
    """Return the tensors that saving ``state`` to the store at ``path`` would write."""
    columns = flatten(state).columns
    tensors = map(NewTensor, columns.names, columns.dtypes, columns.shapes, columns.sizes)
    return Planned(path, run, step, sum(columns.sizes), tuple(tensors))


@contextlib.contextmanager
def foreign_state(
    path: Path,
    progress: Progress | None = None,
    left_out: list[str] | None = None,
    *,
    parts: Sequence[str] = (),
    renames: Renames = (),
) -> Iterator[object]:
    """Yield the content of a foreign file as a state whose tensors are read during the save.

    A torch file or a DCP folder keeps its structure. The fp32 weights, buffers and optimizer state of a DeepSpeed
    folder are assembled to whole tensors. The tensors of a safetensors file or a Hugging Face folder go under
    ``model``. Metadata and small files go under ``safetensors``, so that :func:`export_checkpoint` can restore them.

    Args:
        path: the file or folder.
        progress: callback with the bytes done and the bytes of all tensors.
        left_out: list to which the names of files and sub-folders that are not imported are added.
        parts: dotted names of the parts to import, by default all. The other parts of a torch file or a DCP folder, and
            the ``client_state`` of a DeepSpeed folder, may hold objects of any class, which are never loaded.
        renames: changes of tensor names.

    Raises:
        NotFoundError: the file does not exist.
        InvalidInputError: the format is unknown, or the file lacks a part.
        ForeignFileError: the file breaks the rules of its format, or holds values that cannot be stored. Reading a
            tensor also raises this error if the file changed in the meantime.
    """
    kind = _kind_of(path)
    meter = ProgressMeter(progress)
    files: dict[Path, SourceFile] = {}
    with contextlib.ExitStack() as stack:

        def opened(name: Path) -> SourceFile:
            if name not in files:
                files[name] = stack.enter_context(SourceFile(name, meter.add))
            return files[name]

        if kind == "dcp":
            state = read_dcp_folder(path, opened, parts)
        elif kind == "deepspeed":
            state = read_deepspeed_folder(path, opened, parts)
        elif kind == "folder":
            state = _state_of_folder(path, opened, parts)
        elif kind == "safetensors":
            model, metadata = _weights_of(path, read_header(opened(path)), opened)
            state = {MODEL: model, SOURCE: {"metadata": metadata, "files": {}}}
        elif kind == "torch":
            state = read_torch_file(opened(path), parts=parts)
        else:
            raise InvalidInputError(
                f"cannot import {path}: unknown format; give a safetensors file, a file of torch.save() such as .pt, "
                ".pth, .bin or .ckpt, or a folder"
            )
        if left_out is not None and path.is_dir():
            read = {*_INDEXES, *(file.relative_to(path).parts[0] for file in files)}
            left_out += sorted({item.name for item in path.iterdir()} - read)
        state = rename_tensors(keep_parts(path, state, parts), renames, TensorBytes)
        distinct = {id(leaf): leaf for _, leaf in leaves_of(state) if isinstance(leaf, TensorBytes)}
        meter.total = sum(leaf.nbytes for leaf in distinct.values())
        for file in files.values():
            file.check()
        # The check runs before the caller creates a store.
        with refused(path, str, _REMEDY, UnsupportedValueError):
            flatten(state)
        yield state


def _kind_of(path: Path) -> str:
    with translated("access", path):
        if not path.exists():
            raise NotFoundError(f"{path} does not exist")
        if is_dcp_folder(path):
            return "dcp"
        if is_deepspeed_folder(path):
            return "deepspeed"
        if path.is_dir():
            return "folder"
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            # The content decides, because files of torch.save have any suffix, such as .ckpt or .pth.tar.
            if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
                return "safetensors"
            if head.startswith(TORCH_MARKS):
                return "torch"
        named = format_of(path)
        return "unknown" if named == "folder" else named


def _state_of_folder(path: Path, opened: Callable[[Path], SourceFile], parts: Sequence[str]) -> object:
    """Return the weights of a model folder, with its metadata, and the small files that ``parts`` select."""
    metadata: Mapping[str, str] = {}
    if shards := torch_weights(path):
        model = _torch_weights_of(path, shards, opened)
    else:
        model, metadata = _weights_of(path, read_folder(path, opened), opened)
    wanted = [name for name in other_files(path) if not parts or overlaps(f"{SOURCE}.files.{name}", parts)]
    files = {name: opened(path / name) for name in wanted}
    contents = {name: file.tensor(0, "uint8", (file.size,)) for name, file in files.items()}
    return {MODEL: model, SOURCE: {"metadata": metadata, "files": contents}}


def _weights_of(
    path: Path, header: SafetensorsHeader, opened: Callable[[Path], SourceFile]
) -> tuple[dict[object, object], dict[str, str]]:
    """Return the tensors that a header describes, and the metadata without the entry for tied tensors."""
    sources = {name: opened(name) for name in sorted({tensor.path for tensor in header.tensors})}
    model: dict[object, object] = {
        item.name: sources[item.path].tensor(item.start, item.dtype, item.shape) for item in header.tensors
    }
    model |= {name: model[first] for name, first in _tied(path, header.metadata, model).items()}
    return model, {key: value for key, value in header.metadata.items() if key != TIED}


def _torch_weights_of(path: Path, shards: Sequence[str], opened: Callable[[Path], SourceFile]) -> dict[object, object]:
    model: dict[object, object] = {}
    for shard in shards:
        content = read_torch_file(opened(path / shard))
        if not isinstance(content, dict) or model.keys() & content.keys():
            problem = "not a mapping of tensors by name, or its names are in another shard, too"
            raise ForeignFileError(path / shard, problem, "fetch or export the folder again")
        model |= content
    return model


def _tied(path: Path, metadata: Mapping[str, str], model: Mapping[object, object]) -> dict[str, str]:
    """Return the aliases of tied tensors with their first names, from the metadata of an export."""
    try:
        tied = json.loads(metadata.get(TIED, "{}"))
    except (ValueError, RecursionError):
        tied = None
    if not isinstance(tied, dict) or not all(
        isinstance(first, str) and first in model and name not in model for name, first in tied.items()
    ):
        problem = f"the metadata entry {TIED} names missing tensors, or aliases that are tensors themselves"
        raise ForeignFileError(path, problem, "remove the entry, or export the file again")
    return tied
