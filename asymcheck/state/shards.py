"""Shards: tensors of which each rank holds a part, as torch and its users describe them."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch

from asymcheck.errors import UnsupportedValueError
from asymcheck.format.tree import Key
from asymcheck.state.boxes import Box
from asymcheck.types import Stateful

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_DTENSORS = "torch.distributed.tensor"
_SPLITS = "split_factor"
"""Attribute of a placement that cuts a dimension of the tensor which another mesh dimension has cut before."""


@dataclasses.dataclass(frozen=True, eq=False)
class TensorShard:
    """This rank's part of a tensor that several ranks hold together; stands in a state where the tensor would.

    A ``DTensor`` need not be wrapped, because it has the same information.
    """

    local: torch.Tensor
    """The part that is here."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor, of as many dimensions as the part."""
    offset: tuple[int, ...]
    """Where the part begins in the whole, for each dimension."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor, as that of a ``DTensor`` is; ``local.shape`` is that of the part."""
        return torch.Size(self.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the part and of the whole."""
        return self.local.dtype

    @property
    def box(self) -> Box:
        """The part, without its bytes."""
        return Box(tuple(self.global_shape), tuple(self.offset), tuple(self.local.shape))


@runtime_checkable
class Distributed(Stateful, Protocol):
    """A part of a state that ranks hold together and that knows more than a state_dict() says, such as an engine.

    Stored states have placeholders in the place of tensors.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that changes :meth:`owned`."""

    def owned(self) -> Iterable[torch.Tensor]:
        """Yield tensors of the state that only a step of :attr:`optimizer` changes."""

    def misfits(self, stored: Mapping[Key, object]) -> Iterable[str]:
        """Yield the reasons why the object will refuse a stored state."""

    def missing(self, stored: Mapping[Key, object]) -> Iterable[tuple[object, TensorShard]]:
        """Yield placeholders of tensors that do not exist yet, each with a shard that is cut in the same way."""

    def settle(self) -> None:
        """Do what needs all ranks, after each of them has been restored."""


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Tell whether a value is a DTensor, without importing that part of torch."""
    module = sys.modules.get(_DTENSORS)
    return module is not None and isinstance(value, module.DTensor)


def locals_of(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of tensors, some of which may be DTensors. Training waits for this in each step."""
    if not any(map(is_dtensor, values)):
        return [*values]
    with torch.no_grad():
        return [value.to_local() if is_dtensor(value) else value for value in values]


def layout_of(tensor: DTensor) -> tuple[object, ...]:
    """Return the properties that determine which part this rank has; compare them by :func:`is_laid_out`."""
    return tensor.placements, tensor.device_mesh, tensor.shape


def is_laid_out(tensor: DTensor, layout: tuple[object, ...]) -> bool:
    """Tell whether a DTensor has the layout of an earlier one: the same objects, because equal ones may differ."""
    return tensor.placements is layout[0] and tensor.device_mesh is layout[1] and tensor.shape == layout[2]


def shard_of(tensor: DTensor, path: str) -> TensorShard:
    """Return this rank's part of a DTensor; of a replicated one, all of it.

    Raises:
        UnsupportedValueError: its values are partial sums, or the part is no box, or the part of a scalar is empty.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedValueError(
            path, f"the tensor has placements {tensor.placements}: reduce its partial sums first"
        )
    (local,) = locals_of([tensor])
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # A rank outside the mesh has an empty part, whatever the mesh would give it.
        if not tensor.ndim:
            raise UnsupportedValueError(
                path, "a scalar has no empty part, and this rank is not in its mesh; leave it out of the state here"
            )
        return TensorShard(local.new_empty((0,) * tensor.ndim), tuple(tensor.shape), (0,) * tensor.ndim)
    cuts = tuple([_cut(placement, tensor.ndim, path) for placement in tensor.placements])
    whole = tuple(tensor.shape)
    offset = _offset_of(whole, tuple(local.shape), cuts, tuple(coordinate), tuple(mesh.shape))
    if offset is None:
        raise UnsupportedValueError(
            path,
            f"with placements {tensor.placements} on a mesh of {list(mesh.shape)}, this rank's part of "
            f"{list(whole)} is no box of rows that follow each other; shard a dimension that the ranks divide",
        )
    return TensorShard(local, whole, offset)


_Cut = tuple[int, int] | None
"""The dimension of the tensor that a dimension of the mesh cuts, and the split factor; None where it replicates."""


# Training waits for hundreds of shards of few kinds. Placements are not used as keys, because in some versions of torch
# one that splits is equal to one that does not.
@functools.lru_cache(maxsize=4096)
def _offset_of(
    whole: tuple[int, ...],
    local: tuple[int, ...],
    cuts: tuple[_Cut, ...],
    coordinate: tuple[int, ...],
    mesh: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return where the part of a rank begins; None if it is no box, or has another shape than ``local``."""
    spans = [[range(size)] for size in whole]
    for place, size, cut in zip(coordinate, mesh, cuts, strict=True):
        if cut is not None:
            dim, splits = cut
            spans[dim] = _share(spans[dim], place, size, splits)
    if tuple(map(_count, spans)) != local or any(len(span) > 1 for span in spans):
        return None
    return tuple(span[0].start if span else 0 for span in spans)


def _cut(placement: Placement, dims: int, path: str) -> _Cut:
    if placement.is_replicate():
        return None
    return _dimension(placement, dims, path), getattr(placement, _SPLITS, 1)


def _dimension(placement: Placement, dims: int, path: str) -> int:
    dim = getattr(placement, "dim", None)
    if type(dim) is not int or not -dims <= dim < dims:
        raise UnsupportedValueError(path, f"the tensor has the placement {placement}, which says not what is here")
    return dim % dims


def _share(span: Sequence[range], place: int, size: int, splits: int) -> list[range]:
    """Return the share that one of ``size`` ranks has of a dimension, cut as torch cuts it.

    With ``splits`` above 1, another mesh dimension has cut it into as many parts before (FSDP over tensor parallelism),
    and the rank has a share of each.
    """
    shares = [part for number in range(splits) for part in _chunk(_chunk(span, number, splits), place, size)]
    joined: list[range] = []
    for part in shares:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _chunk(span: Sequence[range], number: int, count: int) -> list[range]:
    """Return one of ``count`` chunks: all have the same length but the last ones, which may be shorter or empty."""
    length = -(-_count(span) // count)
    skipped, found = number * length, []
    for part in span:
        chosen = part[skipped : skipped + length]
        skipped = max(skipped - len(part), 0)
        length -= len(chosen)
        if chosen:
            found.append(chosen)
    return found


def _count(span: Sequence[range]) -> int:
    return sum(map(len, span))


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the shape and placements of another one, whose part on this rank is ``local``."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only there for those who use it

    # Not the strides of the other one, because the new part is in row-major order.
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim))
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=strides
    )
