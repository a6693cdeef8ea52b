"""Partial copies: a glob selects tensors and plain values of a checkpoint (SPEC.md §B2, §C4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asymcheck.config import WRITER
from asymcheck.errors import InvalidInputError
from asymcheck.format.digest import digest
from asymcheck.format.manifest import Manifest, manifest_of, renamed_rows
from asymcheck.format.tree import Node
from asymcheck.restore.state_template import RowRef, read_shape, select
from asymcheck.state.typed_values import TypedValue
from asymcheck.state.walk import Walker
from asymcheck.storage.interfaces import StoreTier
from asymcheck.storage.manifests import CheckpointFiles
from asymcheck.storage.remote import RemoteTier
from asymcheck.types import CheckpointRef, SaveId


def source_record(tier: StoreTier, run: str, ref: CheckpointRef, weight: float | None) -> dict[str, object]:
    """Describe a source in the key ``merged`` of a manifest."""
    described = {"store_id": tier.descriptor.store_id.hex(), "run": run, "step": ref.step, "generation": ref.generation}
    return {**described, "save_id": ref.save_id.hex(), "weight": weight}


@dataclasses.dataclass(frozen=True)
class Selection:
    """Tensors and plain values to copy."""

    tensors: str  # glob of dotted names
    run: str  # run for the copy, without checkpoints of a training

    def ref(self, listing: CheckpointFiles) -> CheckpointRef:
        """Return the identity of the copy. It is the same in each attempt, so that an attempt can be continued."""
        save_id = listing.ref.save_id
        unique = digest(b"\0".join([save_id, listing.run.encode(), self.tensors.encode()]))
        # Up to a second later than the source, so that the first digits distinguish the copies of one checkpoint.
        time_ns = int.from_bytes(save_id[:8], "big") + int.from_bytes(unique[8:], "big") % 10**9
        return CheckpointRef(1, listing.ref.step, SaveId(min(time_ns, 2**64 - 1).to_bytes(8, "big") + unique[:8]))

    def cut(self, remote: RemoteTier, listing: CheckpointFiles, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Return the manifests of the copy, one for each rank; raise InvalidInputError if no name matches."""
        sources = [source_record(remote, listing.run, listing.ref, 1.0)]
        origin = {"location": str(remote.location), "tensors": self.tensors}
        merged = {"method": "pull", "sources": sources, "base": None, **origin}
        parts, no_match = list[Manifest](), list[InvalidInputError]()
        for manifest in manifests:
            walker, shape = _ShapeWalker(), None
            try:
                shape = select(read_shape(manifest), self.tensors)
            except InvalidInputError as error:
                shape = {}
                no_match.append(error)
            tree, header = walker.node(shape, None, 0), manifest.header
            header = dataclasses.replace(header, run=self.run, ref=self.ref(listing), parent=None, writer=WRITER)
            header = dataclasses.replace(header, tree=tree, store_ranks=None, elsewhere=b"", merged=merged)
            parts.append(manifest_of(header, renamed_rows(manifest, walker.names)))
        if len(no_match) == len(parts):
            raise no_match[0]
        return parts


class _ShapeWalker(Walker):
    """Encodes a part of a stored shape, and numbers its rows anew."""

    def __init__(self) -> None:
        super().__init__({})
        self.names: dict[int, list[str]] = {}  # names by the old numbers, in the order of the new ones
        self._numbers: dict[int, int] = {}

    def node(self, value: object, name: str | None, depth: int) -> Node:
        if isinstance(value, RowRef):
            self.names.setdefault(value.row, []).append(name or "")
            return ["N" if value.as_array else "T", self._numbers.setdefault(value.row, len(self._numbers))]
        return self._typed(value, name, depth) if isinstance(value, TypedValue) else super().node(value, name, depth)
