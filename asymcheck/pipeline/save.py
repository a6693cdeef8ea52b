"""One rank's save, in the order of SPEC.md §8.1. When it returns, the checkpoint is durable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from asymcheck.format.manifest import manifest_of
from asymcheck.partition.plan import PLAN_KIND, cut
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.encoder import Encoder
from asymcheck.pipeline.flush import Flusher
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.pipeline.rows import Rows, inline_bytes, manifest_header
from asymcheck.pipeline.transaction import CommitTransaction
from asymcheck.tiers.gpu_staging import catch_up
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.types import CheckpointRef


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """What a save did."""

    ref: CheckpointRef
    """The checkpoint's identity."""
    state_bytes: int
    """Bytes of all tensors."""
    written_bytes: int
    """Payload bytes written; the rest was in the store already."""


def save(
    tier: NvmeTier,
    catalog: Catalog,
    encoder: Encoder,
    state: FlatState,
    request: SaveRequest,
    placing: Callable[[], Place],
) -> SaveResult:
    """Store a state, encoded as ``encoder`` says, and commit it.

    ``placing`` says where on the line it goes. It is asked when all but the manifest is durable: a generation that is
    opened for a checkpoint must not be opened for one that fails.

    Raises:
        StorageError: the device or file system refused. Nothing was committed, earlier checkpoints are untouched.
        StructureError: the manifest could not be read again; nothing was committed, either.
    """
    leaves = state.leaves
    catch_up(leaf.source.device for leaf in leaves if isinstance(leaf.source, torch.Tensor))
    columns = state.columns
    plan = cut(columns.sizes, columns.groups, tier.config, columns.widths)
    try:
        with CommitTransaction(tier, catalog, encoder, request.save_id, request.rank) as transaction:
            flusher = Flusher(tier, transaction, encoder, leaves)
            names = flusher.write(plan.partitions)
            named = list(zip(plan.partitions, names, strict=True))
            table = Rows().columns(columns, plan, names, inline_bytes(leaves, plan))
            # The commit replaces the generation and adds packs and parent.
            ref = CheckpointRef(1, request.step, request.save_id)
            header = manifest_header(request, ref, None, (), {"number": 0, "kind": PLAN_KIND}, state.tree)
            ref = transaction.commit(
                manifest_of(header, table),
                placing,
                lambda lost: flusher.write([partition for partition, name in named if name in lost]),
            )
    finally:
        for leaf in leaves:
            leaf.release()
    return SaveResult(ref, sum(leaf.nbytes for leaf in leaves), transaction.packing.written_bytes)
