"""Tensors that share some of their memory, filled in place: what the last one took is what all of them hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def overlapping(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of those that may share memory with another of them, in ascending order.

    Judged by the stretch from the first byte to the last: slices that lie between each other count, too.
    """
    stretches = sorted((str(one.device), *_stretch(one), number) for number, one in enumerate(tensors) if one.numel())
    found: set[int] = set()
    widest: tuple[str, int, int] | None = None
    """Of those so far the one that reaches furthest: what overlaps any of them overlaps it."""
    for device, start, end, number in stretches:
        if widest is not None and widest[0] == device and start < widest[1]:
            found |= {number, widest[2]}
        if widest is None or widest[0] != device or end > widest[1]:
            widest = device, end, number
    return sorted(found)


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def holds(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether a tensor has the bytes of another one of its dtype and shape."""
    return torch.equal(_bytes(tensor), _bytes(expected).to(tensor.device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
