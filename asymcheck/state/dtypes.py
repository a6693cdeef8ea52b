"""torch dtypes by their names in the format (SPEC.md §A15)."""

from __future__ import annotations

import torch

from asymcheck.format.registry import DTYPE_BYTES

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in DTYPE_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""Dtypes of the registry that the installed torch supports."""

TORCH_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
