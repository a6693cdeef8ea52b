"""Shards: parts of distributed tensors, from DTensor or TensorShard."""

from __future__ import annotations

import abc
import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

from asymcheck.errors import UnsupportedValueError
from asymcheck.format.tree import Key
from asymcheck.state.boxes import Box, strides_of
from asymcheck.state.leaves import PLAIN_TENSORS
from asymcheck.types import Stateful

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_DTENSORS = "torch.distributed.tensor"
_SPLITS = "split_factor"
"""Attribute of a placement that splits a tensor dimension which another mesh dimension has already split."""


@dataclasses.dataclass(frozen=True, eq=False)
class TensorShard:
    """Shard of a tensor on this rank, which replaces the tensor in a state.

    A ``DTensor`` has the same information, and needs no wrapper.
    """

    local: torch.Tensor
    """Data of the shard."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor, with as many dimensions as the shard."""
    offset: tuple[int, ...]
    """Offset of the shard in the whole tensor, per dimension."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor, as for a ``DTensor``. ``local.shape`` is the shape of the shard."""
        return torch.Size(self.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.local.dtype

    @property
    def box(self) -> Box:
        """Box of the shard in the whole tensor."""
        return Box(tuple(self.global_shape), tuple(self.offset), tuple(self.local.shape))


class Distributed(Stateful, abc.ABC):
    """Object in the state of several ranks that needs more than ``state_dict()``, such as a DeepSpeed engine.

    Stored states have placeholders instead of tensors.
    """

    @property
    @abc.abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer that changes :meth:`owned`."""

    @abc.abstractmethod
    def owned(self) -> Iterable[torch.Tensor]:
        """Yield tensors of the state that only a step of :attr:`optimizer` changes."""

    @abc.abstractmethod
    def misfits(self, stored: Mapping[Key, object]) -> Iterable[str]:
        """Yield the reasons why the object will refuse a stored state."""

    @abc.abstractmethod
    def missing(self, stored: Mapping[Key, object]) -> Iterable[tuple[object, TensorShard]]:
        """Yield placeholders of tensors that do not exist yet, each with a shard of the same layout."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Run collective steps after all ranks were restored."""


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Tell whether a value is a DTensor, without importing ``torch.distributed.tensor``."""
    module = sys.modules.get(_DTENSORS)
    return module is not None and isinstance(value, module.DTensor)


def locals_of(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local data of tensors, some of which may be DTensors. Training waits for this in each step."""
    if PLAIN_TENSORS.issuperset(map(type, values)):
        return [*values]
    with torch.no_grad():
        return [value.to_local() if is_dtensor(value) else value for value in values]


def layout_of(tensor: DTensor) -> tuple[object, ...]:
    """Return the properties that determine the shard of this rank; compare them with :func:`is_laid_out`."""
    return tensor.placements, tensor.device_mesh, tensor.shape


def is_laid_out(tensor: DTensor, layout: tuple[object, ...]) -> bool:
    """Tell whether a DTensor has an earlier layout. Objects are compared by identity, because equal ones may differ."""
    return tensor.placements is layout[0] and tensor.device_mesh is layout[1] and tensor.shape == layout[2]


def shard_of(tensor: DTensor, path: str) -> TensorShard:
    """Return the shard of a DTensor on this rank, which is the whole tensor if it is replicated.

    Raises:
        UnsupportedValueError: the values are partial sums, the shard is no box, or the shard of a scalar is empty.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedValueError(
            path, f"the tensor has placements {tensor.placements}: reduce its partial sums first"
        )
    (local,) = locals_of([tensor])
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # A rank outside of the mesh has an empty shard.
        if not tensor.ndim:
            raise UnsupportedValueError(
                path,
                "this rank is not in the mesh of a scalar, which has no empty shard; leave it out of the state here",
            )
        return TensorShard(local.new_empty((0,) * tensor.ndim), tuple(tensor.shape), (0,) * tensor.ndim)
    cuts = tuple([_cut(placement, tensor.ndim, path) for placement in tensor.placements])
    whole = tuple(tensor.shape)
    offset = _offset_of(whole, tuple(local.shape), cuts, tuple(coordinate), tuple(mesh.shape))
    if offset is None:
        raise UnsupportedValueError(
            path,
            f"with placements {tensor.placements} on a mesh of {list(mesh.shape)}, the shard of {list(whole)} on this "
            "rank is not contiguous; shard a dimension that the number of ranks divides",
        )
    return TensorShard(local, whole, offset)


_Cut = tuple[int, int] | None
"""Tensor dimension that a mesh dimension splits, and the split factor; None if it replicates."""


# Training waits for hundreds of shards of few kinds, so results are cached. Placements are no keys of the cache,
# because in some versions of torch, different placements compare equal.
@functools.lru_cache(maxsize=4096)
def _offset_of(
    whole: tuple[int, ...],
    local: tuple[int, ...],
    cuts: tuple[_Cut, ...],
    coordinate: tuple[int, ...],
    mesh: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the offset of a rank's shard; None if it is no box, or has another shape than ``local``."""
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
    dim = getattr(placement, "dim", None)
    if type(dim) is not int or not -dims <= dim < dims:
        raise UnsupportedValueError(path, f"the tensor has the unsupported placement {placement}; redistribute it")
    return dim % dims, getattr(placement, _SPLITS, 1)


def _share(span: Sequence[range], place: int, size: int, splits: int) -> list[range]:
    """Return the indices of one of ``size`` ranks in a dimension, split as by torch.

    With ``splits`` above 1, another mesh dimension has split the dimension before (FSDP with tensor parallelism), and
    the rank has a share of each part.
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
    """Return one of ``count`` chunks of equal length, except that the last ones may be shorter or empty."""
    length = -(-_count(span) // count)
    skipped, share = number * length, []
    for part in span:
        chosen = part[skipped : skipped + length]
        skipped = max(skipped - len(part), 0)
        length -= len(chosen)
        if chosen:
            share.append(chosen)
    return share


def _count(span: Sequence[range]) -> int:
    return sum(map(len, span))


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the shape and placements of another one, and ``local`` as its shard on this rank."""
    if tensor.device.type != tensor.device_mesh.device_type:
        # With CPU offload, all optimizer state may be too large for the device to which from_local() moves the shards.
        made = torch.empty_like(tensor, dtype=local.dtype)
        locals_of([made])[0].copy_(local)
        return made  # type: ignore[return-value]  # a DTensor, like the other one
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - an optional part of torch

    # Row-major strides, which may differ from those of the other tensor.
    stride = strides_of(tensor.shape)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=stride
    )
