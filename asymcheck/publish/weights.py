"""Weights of a subscriber: its tensors by the names of a release, and the exchange of their memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from asymcheck.errors import StateMismatchError, listed
from asymcheck.format.manifest import Manifest, TensorRow
from asymcheck.format.registry import BLOCK_BYTES
from asymcheck.restore.assemble import SHIFTED_MIN_BYTES, overlapping
from asymcheck.restore.read_plan import Demand
from asymcheck.restore.reshard import StoredPiece
from asymcheck.state.dtypes import TORCH_NAMES
from asymcheck.state.leaves import identity_key
from asymcheck.state.shards import is_dtensor
from asymcheck.state.walk import below, is_to_be_called
from asymcheck.storage.gpu_staging import outlast_queue

_SHOWN = 4


def tensors_of(value: object, name: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module, or of nested mappings and modules, with their dotted names."""
    if isinstance(value, torch.Tensor):
        yield name or "", value
    elif isinstance(value, torch.nn.Module):
        # With keep_vars, the values are the parameters themselves.
        yield from tensors_of(dict(value.state_dict(keep_vars=True)), name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, below(name, str(key)))
    elif is_to_be_called(value):
        yield from tensors_of(value.state_dict(), name)


@dataclasses.dataclass
class Weight:
    """A tensor of a release, and the tensors of the subscriber that receive it."""

    row: TensorRow  # the stored tensor
    tensors: list[torch.Tensor]  # tensors with distinct memory
    ties: list[torch.Tensor]  # tensors that are views of the memory of the first one, with the same shape

    @property
    def state(self) -> tuple[tuple[int, int], ...]:
        """Addresses and version counters, which show whether anybody replaced or changed the tensors."""
        return tuple((tensor.data_ptr(), _version(tensor)) for tensor in (*self.tensors, *self.ties))

    @property
    def device(self) -> torch.device:
        """Device of the tensors; the CPU for a new tensor."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def demand(self, *, in_place: bool = False) -> Demand:
        """Return the demand for the bytes of the tensor."""
        return Demand(self.row, [StoredPiece(self.row, None)], [*self.tensors] if in_place else [])


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def match(into: object, manifest: Manifest, release: str) -> list[Weight]:
    """Return the weights of a release that the tensors of ``into`` receive.

    The names in the release may have a common prefix, such as ``model``. An empty dict receives new tensors.

    Raises:
        StateMismatchError: names, shapes, dtypes or ties differ; nothing was changed.
    """
    pairs, rows = list(tensors_of(into)), manifest.rows()
    given = dict(pairs)
    by_name = {name: row for row in rows for name in (row.name, *row.aliases)}
    shared = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    shared += [row.name for row in rows if by_name[row.name] is not row]
    if shared:
        raise StateMismatchError(
            f"{shared[0]} is the name of two tensors of the given state, or of {release}; nothing was changed. Use "
            "keys without dots"
        )
    if isinstance(into, dict) and not into:
        return [Weight(row, [], []) for row in rows]
    prefix = _prefix(given, by_name)
    missing = [name for name in given if prefix + name not in by_name]
    unused = [row.name for row in rows if not any(n.removeprefix(prefix) in given for n in (row.name, *row.aliases))]
    if missing or unused:
        parts = [
            f"{what} {listed(names, _SHOWN)}"
            for what, names in (("it lacks", missing), ("the given state lacks", unused))
            if names
        ]
        raise StateMismatchError(
            f"{release} is of another architecture: {'; '.join(parts)}. Nothing was changed. Give the model that is "
            "published, or publish other tensors"
        )
    weights: dict[str, Weight] = {}
    taken: dict[tuple[object, ...], str] = {}
    for name, tensor in given.items():
        row = by_name[prefix + name]
        weight = weights.setdefault(row.name, Weight(row, [], []))
        _take(weight, tensor, name, taken, release)
    return list(weights.values())


def _prefix(given: Mapping[str, object], stored: Mapping[str, object]) -> str:
    first = next(iter(given), "")
    ends = [name.removesuffix(first) for name in stored if name == first or name.endswith(f".{first}")]
    fitting = [prefix for prefix in ends if all(prefix + name in stored for name in given)]
    return min(fitting, key=len, default="")


def _take(weight: Weight, tensor: torch.Tensor, name: str, taken: dict[tuple[object, ...], str], release: str) -> None:
    row, dtype = weight.row, TORCH_NAMES.get(tensor.dtype, str(tensor.dtype))
    if not _has_memory(tensor):
        raise StateMismatchError(
            f"tensor {name} has no memory for the whole weights: it is sharded, sparse, or on the meta device; nothing "
            "was changed. Give a dense tensor; for a model on the meta device, call to_empty(device=…) first"
        )
    if (dtype, tuple(tensor.shape)) != (row.dtype, row.shape):
        remedy = ""
        if tuple(tensor.shape) == row.shape:
            remedy = f". Convert the model, or publish with dtype=torch.{dtype}"
        raise StateMismatchError(
            f"tensor {name} is {dtype} {list(tensor.shape)}, but {release} has {row.dtype} {list(row.shape)}; nothing "
            f"was changed{remedy}"
        )
    key = identity_key(tensor)
    if key is None or key not in taken:
        weight.tensors.append(tensor)
    elif taken[key] != row.name:
        raise StateMismatchError(
            f"tensor {name} shares its memory with {taken[key]}, but they differ in {release}; nothing was changed"
        )
    elif all(tensor is not other for other in (*weight.tensors, *weight.ties)):
        weight.ties.append(tensor)
    if key is not None:
        taken[key] = row.name


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not is_dtensor(tensor)


class Exchange:
    """Replaces the memory of tensors at once, or copies where other tensors may see the same memory."""

    def __init__(self, pairs: Sequence[tuple[Weight, torch.Tensor]], *, copies: bool) -> None:
        """Prepare to give each weight its new tensor; with ``copies``, keep all addresses."""
        self._moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.old: list[torch.Tensor] = []
        """The replaced memory, to be freed when the consumer does not wait."""
        every = [tensor for weight, _ in pairs for tensor in weight.tensors]
        shared = {id(every[number]) for number in overlapping(every)}
        for weight, new in pairs:
            for number, tensor in enumerate(weight.tensors):
                is_own = tensor.is_contiguous() and _slack(tensor) in (0, BLOCK_BYTES) and id(tensor) not in shared
                # torch calls each tensor on a GPU shared.
                if copies or not is_own or (tensor.is_cpu and tensor.is_shared()):
                    self._copies.append((tensor, new))
                    continue
                part = new if number == 0 else new.to(tensor.device, copy=True)
                views = [tensor, *weight.ties] if number == 0 else [tensor]
                self._moves += [(view, _for_inference(part) if view.is_inference() else part) for view in views]

    @property
    def overwrites(self) -> bool:
        """Whether some tensors keep their memory, so that a failure cannot be undone."""
        return bool(self._copies)

    @torch.no_grad()
    def carry_out(self) -> None:
        """Exchange. After a failure, all moved tensors have their old memory again."""
        try:
            for tensor, new in self._copies:
                tensor.detach().copy_(new)
                outlast_queue(new)
            for tensor, new in self._moves:
                old = tensor.detach()
                # Requests that the consumer has queued may still read this memory.
                outlast_queue(old)
                self.old.append(old)
                tensor.data = new
        except BaseException:
            for (tensor, _), old in zip(self._moves, self.old, strict=False):
                tensor.data = old
            raise


def _for_inference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that an inference tensor can take over."""
    with torch.inference_mode():
        memory = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*memory)


def _slack(tensor: torch.Tensor) -> int:
    """Return the bytes of a storage beyond one tensor, to which other tensors may belong.

    A large tensor of an earlier update has a block more than it needs, which counts as its own.
    """
    slack = tensor.untyped_storage().nbytes() - tensor.nbytes
    return slack if slack != BLOCK_BYTES or tensor.nbytes >= SHIFTED_MIN_BYTES else -1
