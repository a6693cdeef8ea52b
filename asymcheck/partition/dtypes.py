"""torch and numpy dtypes by their names in the format (SPEC.md §15)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asymcheck.format.registry import DTYPE_BYTES

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in DTYPE_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""Those of the registry that this torch has."""

TORCH_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_NUMPY_KINDS = "biufc"

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name)
    for name in DTYPE_BYTES
    if "float8" not in name and name not in ("bfloat16", "float4_e2m1fn_x2", "complex32")
}
"""Those of the registry that numpy has."""


def numpy_name(dtype: npt.DTypeLike) -> str | None:
    """Return the format's name of a numpy dtype, or None when it has none (objects, strings, big-endian numbers.

    Records).
    """
    exact = np.dtype(dtype)
    return exact.name if exact.kind in _NUMPY_KINDS and exact.isnative and exact.name in NUMPY_DTYPES else None
