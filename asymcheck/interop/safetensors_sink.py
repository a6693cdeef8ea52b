"""A checkpoint, or a part of it, as a safetensors file or a Hugging Face folder, written while it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asymcheck.interop.files import Draft
from asymcheck.interop.hugging_face import INDEX_NAME, Shard, encode_index, plan_shards
from asymcheck.interop.part import MODEL, Part, encode_tied
from asymcheck.interop.safetensors_format import NewTensor, encode_header
from asymcheck.recovery.assemble import ByteTarget
from asymcheck.recovery.stream import Outline
from asymcheck.tiers.files import translated

# What transformers asks of every file that it reads.
_FORMAT = {"format": "pt"}
_CONFIGURATION = "config.json"
_SHOWN = 4


class SafetensorsSink:
    """Writes tensors only; what else there is in the part is listed in :attr:`left_out`."""

    def __init__(
        self,
        draft: Draft,
        pick: Callable[[object], Part],
        *,
        max_shard_bytes: int | None,
        files: Sequence[Path] = (),
    ) -> None:
        """Write to ``draft`` what ``pick`` returns of a checkpoint's shape.

        Args:
            draft: the file, or the folder.
            pick: chooses the part.
            max_shard_bytes: for a folder, the most bytes of tensors in one file; None for a single file.
            files: for a folder, further files to be copied into it; they come before those of the checkpoint.
        """
        self._draft = draft
        self._pick = pick
        self._max_shard_bytes = max_shard_bytes
        self._files = list(files)
        self.tensors = 0
        """Tensors written; tied ones count once."""
        self.nbytes = 0
        """Bytes of them."""
        self.left_out: list[str] = []
        """Names of values that are no tensors."""
        self.hints: list[str] = []
        """Why other programs may not make of it what is expected, and what to do."""

    def begin(self, outline: Outline) -> Mapping[int, ByteTarget]:
        """Write headers, index and small files; return the places of the tensors."""
        part = self._pick(outline.shape)
        rows, tied = part.rows_by_name()
        self.left_out = part.plain_names()
        self.hints = self._hints(part)
        tensors = []
        for name, row in rows.items():
            stored = outline.tensors[row]
            tensors.append(NewTensor(name, stored.dtype, stored.shape, stored.nbytes))
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
                row = rows[tensor.name]
                targets[row] = file.region(outline.tensors[row], start)
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

    def _beside(self, part: Part, outline: Outline) -> dict[int, ByteTarget]:
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

    def finish(self) -> None:
        """Give the file or the folder its name."""
        self._draft.publish()

    def abandon(self) -> None:
        """Remove what was written."""
        self._draft.discard()
