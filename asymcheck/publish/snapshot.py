"""Snapshot of selected tensors of a training state in host memory."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

import torch

from asymcheck.errors import InvalidInputError
from asymcheck.state.leaves import identity_key, make_leaf
from asymcheck.state.names import no_match
from asymcheck.state.shards import TensorShard, is_dtensor
from asymcheck.state.walk import Called, below, is_to_be_called, state_of
from asymcheck.storage.pages import use_huge_pages

Copies = dict[str, torch.Tensor]


class Snapshot:
    """Copies selected tensors, cast, and reuses the memory of the snapshot before the previous one."""

    def __init__(self, pattern: str, dtype: torch.dtype | None) -> None:
        """Select tensors by a glob of dotted names; cast floating-point tensors to ``dtype``."""
        self._pattern, self._dtype = pattern, dtype
        # Only objects below this prefix are asked for their state, because some state_dict() are expensive.
        self._prefix = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        self._kept: Copies = {}
        self._spare: Copies = {}
        self._taken: Copies = {}
        self._copies_all = True

    def take(self, state: object, *, copies: bool = True) -> dict[str, object]:
        """Return nested mappings with copies of the selected tensors. Tied tensors stay tied.

        Without ``copies``, only tensors that are cast are copied, because the caller will not change the others.

        Raises:
            InvalidInputError: no tensor matches, a tensor is sharded, or cannot be stored.
        """
        self._copies_all = copies
        self._taken, tied = {}, dict[tuple[object, ...], torch.Tensor]()
        # Kept to the end, because a new tensor at the address of a freed one would count as tied to it.
        called: Called = {}
        selected = self._copy(state, None, tied, called)
        if not isinstance(selected, dict):
            whole = state_of(state, called) if is_to_be_called(state) else state
            raise no_match(self._pattern, map(str, whole) if isinstance(whole, dict) else (), "the state")
        return selected

    def keep(self) -> None:
        """Keep the newest snapshot as the base of the next one, and reuse the memory of the one before."""
        self._spare, self._kept, self._taken = self._kept, self._taken, {}

    def _copy(
        self, value: object, name: str | None, tied: dict[tuple[object, ...], torch.Tensor], called: Called
    ) -> object:
        if name is not None and not self._may_match(name):
            return None
        if isinstance(value, (torch.Tensor, TensorShard)):
            if not fnmatch.fnmatchcase(name or "", self._pattern):
                return None
            if isinstance(value, TensorShard) or is_dtensor(value):
                raise InvalidInputError(
                    f"tensor {name} is sharded, and one rank cannot publish it: save checkpoints, and run "
                    "'asymcheck publish STORE --to LOCATION --follow', which assembles the shards"
                )
            return self._tensor(value, name or "", tied)
        if is_to_be_called(value):
            value = state_of(value, called)
        items = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, (list, tuple)):
            items = dict(enumerate(value)).items()
        copies = {key: self._copy(item, below(name, str(key)), tied, called) for key, item in items}
        return {key: copy for key, copy in copies.items() if copy is not None} or None

    def _may_match(self, name: str) -> bool:
        return f"{name}.".startswith(self._prefix) or self._prefix.startswith(f"{name}.") or name == self._prefix

    def _tensor(self, value: torch.Tensor, name: str, tied: dict[tuple[object, ...], torch.Tensor]) -> torch.Tensor:
        make_leaf(value, name, "")
        key = identity_key(value)
        copy = None if key is None else tied.get(key)
        if copy is None:
            dtype = self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype
            if not self._copies_all and dtype == value.dtype:
                return value
            copy = self._spare.pop(name, None)
            if copy is None or (copy.dtype, copy.shape) != (dtype, value.shape):
                copy = torch.empty(value.shape, dtype=dtype, device="cpu")
                use_huge_pages(copy.data_ptr(), copy.nbytes)
            with torch.no_grad():
                copy.copy_(value)
            if key is not None:
                tied[key] = copy
            self._taken[name] = copy
        return copy
