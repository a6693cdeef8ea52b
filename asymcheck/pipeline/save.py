"""One rank's save, in the order of SPEC.md §8.1. When it returns, the checkpoint is durable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from asymcheck.format.catalog import pin_key
from asymcheck.format.manifest import encode, manifest_of
from asymcheck.format.manifest_reader import check_manifest
from asymcheck.partition.plan import PLAN_KIND, cut
from asymcheck.partition.state import FlatState
from asymcheck.pipeline.commit import enter, finish, take_back
from asymcheck.pipeline.encoder import Encoder
from asymcheck.pipeline.flush import Flusher
from asymcheck.pipeline.packing import Packing
from asymcheck.pipeline.request import Place, SaveRequest
from asymcheck.pipeline.rows import Rows, encoding_record, inline_bytes, manifest_header
from asymcheck.tiers.gpu_staging import catch_up
from asymcheck.tiers.nvme import Catalog, NvmeTier
from asymcheck.tiers.owners import hold, let_go
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
    packing = Packing(tier, catalog)
    flusher = Flusher(tier, packing, encoder, leaves)
    save_id = request.save_id
    ref: CheckpointRef | None = None
    pin = pin_key(save_id, request.rank)
    hold(pin)
    try:
        names = flusher.write(plan.partitions)
        named = list(zip(plan.partitions, names, strict=True))
        packs = enter(
            tier,
            catalog,
            packing,
            names,
            pin,
            lambda lost: flusher.write([partition for partition, name in named if name in lost]),
        )
        table = Rows().columns(columns, plan, names, inline_bytes(leaves, plan))
        place = placing()
        ref = CheckpointRef(place.generation, request.step, save_id)
        described = {"number": 0, "kind": PLAN_KIND, **encoding_record(encoder.reasons())}
        header = manifest_header(request, ref, place.parent, packs, described, state.tree)
        manifest = manifest_of(header, table)
        check_manifest(manifest, "manifest of a save")
        data = encode(manifest)
        name = tier.manifests.publish(request.run, ref, request.rank, request.world_size, data)
        finish(catalog, request.run, ref, name, len(data), pin)
    except BaseException:
        take_back(tier, catalog, request.run, request.rank, ref, pin)
        raise
    finally:
        let_go(pin)
        packing.abandon()
        for leaf in leaves:
            leaf.release()
    return SaveResult(ref, sum(leaf.nbytes for leaf in leaves), packing.written_bytes)
