"""numpy dtypes by their names in the format (SPEC.md §A15), for use without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asymcheck.format.registry import DTYPE_BYTES

_NUMPY_KINDS = "biufc"

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name)
    for name in DTYPE_BYTES
    if "float8" not in name and name not in ("bfloat16", "float4_e2m1fn_x2", "complex32")
}
"""Dtypes of the registry that numpy supports."""


def numpy_name(dtype: npt.DTypeLike) -> str | None:
    """Return the format's name of a numpy dtype; None for unsupported ones (objects, strings, big-endian)."""
    exact = np.dtype(dtype)
    return exact.name if exact.kind in _NUMPY_KINDS and exact.isnative and exact.name in NUMPY_DTYPES else None
