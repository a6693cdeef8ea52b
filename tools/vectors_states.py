"""Create the states of the frozen stores."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES
from tools.vectors_base import fixed_bytes


def training_state(step: int, change: int | None = None) -> dict[str, object]:
    """Return a model and its optimizer at a step; ``change`` is the third of the large weight that changes."""
    weight = torch.arange(3000, dtype=torch.float32).reshape(30, 100)
    if change is not None:
        weight[10 * change + 5] = float(step)
    embedding = torch.linspace(0, step, 256).reshape(16, 16)
    model: OrderedDict[str, object] = OrderedDict()
    model["wte.weight"] = model["lm_head.weight"] = embedding
    model["h.weight"] = weight
    model["h.bias"] = torch.full((100,), step / 7)
    # Use the same mapping as Module.state_dict().
    setattr(model, "_metadata", OrderedDict([("", {"version": 1}), ("h", {"version": 1})]))  # noqa: B010 - not ours
    moments = {"exp_avg": embedding / 3, "exp_avg_sq": embedding * embedding, "step": torch.tensor(float(step))}
    group = {"lr": 1e-3 / (step + 1), "betas": (0.9, 0.999), "amsgrad": False, "params": [0]}
    return {
        "model": model,
        "optimizer": {"state": {0: moments}, "param_groups": [group]},
        "epoch": step // 10,
    }


def everything() -> dict[str, object]:
    """Return a state with every kind of node, every dtype that this torch has, and every kind of extent."""
    return {"values": _values(), "tensors": _tensors(), "arrays": _arrays()}


def _values() -> dict[str, object]:
    return {
        "none": None,
        "booleans": [True, False],
        "integers": [0, -1, (1 << 53) - 1, 1 << 53, -(1 << 200)],
        "floats": [0.1, -0.0, 5e-324, float("inf"), float("-inf"), float("nan")],
        "complex": complex(1.5, -0.0),
        "strings": ["", "T", "K\u00e4se \U0001f9c0\n\0"],
        "bytes": [b"", bytes(range(256))],
        "containers": {"list": [], "tuple": (), "nested": ([1, (2,)], {}), "ordered": OrderedDict(b=1, a=2)},
        "keys": {0: "integer", "0": "string", -5: "negative", 1 << 60: "big", "": "empty"},
        "size": torch.Size([2, 0, 3]),
        "dtypes": [torch.float32, torch.bfloat16],
        "devices": [torch.device("cpu"), torch.device("cuda:0")],
        "scalars": [np.float32(0.1), np.int64(-1), np.bool_(True), np.complex128(1j)],
    }


def _tensors() -> dict[str, object]:
    dtypes = {}
    for name, size in DTYPE_BYTES.items():
        data = bytes([1, 0, 1]) if name == "bool" else fixed_bytes(name, 3 * size)
        dtypes[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))
    base = torch.arange(24, dtype=torch.int16)
    tied = torch.arange(200, dtype=torch.int32)
    return {
        "dtypes": dtypes,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": base.reshape(4, 6).T,
        "slice": base[3:9:2],
        "overlapping": [base[:16], base[8:]],
        "tied": [tied, {"again": tied}],
        # One payload has blocks of its own, and one payload shares the header's block.
        "large": torch.arange(16500, dtype=torch.int32) % 97,
        "bundled": [torch.full((300,), 1.0), torch.full((500,), 2.0)],
    }


def _arrays() -> dict[str, object]:
    dtypes: dict[str, object] = {}
    for name, dtype in NUMPY_DTYPES.items():
        data = bytes([0, 1]) if name == "bool" else fixed_bytes(f"numpy {name}", 2 * DTYPE_BYTES[name])
        dtypes[name] = np.frombuffer(data, dtype=dtype).copy()
    return {"dtypes": dtypes, "scalar": np.array(7), "fortran": np.asfortranarray(np.arange(6).reshape(2, 3))}
