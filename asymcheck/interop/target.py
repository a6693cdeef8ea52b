"""Where a checkpoint may be written to: what a name stands for, and which places are refused."""

from __future__ import annotations

import os
from pathlib import Path

from asymcheck.errors import InvalidInputError
from asymcheck.format.layout import DESCRIPTOR_NAME

_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
# Names that stand for one file of a format which is not written here: a folder of that name is not what is meant.
_UNKNOWN = (
    *(
        ".ckpt",
        ".gguf",
        ".ggml",
        ".h5",
        ".hdf5",
        ".keras",
        ".msgpack",
        ".npy",
        ".npz",
        ".onnx",
        ".ot",
        ".pb",
        ".pickle",
    ),
    *(".pkl", ".tflite", ".json", ".gz", ".tar", ".tgz", ".xz", ".zip", ".zst"),
)


def format_of(path: Path) -> str:
    """Return the format that a name stands for: ``safetensors``, ``torch``, ``unknown``, or else ``folder``."""
    suffix = path.suffix.lower()
    if suffix == _SAFETENSORS:
        return "safetensors"
    if suffix in _TORCH:
        return "torch"
    return "unknown" if suffix in _UNKNOWN else "folder"


def check_target(path: Path) -> str:
    """Return the format of a place to write to.

    Raises:
        InvalidInputError: nothing can be written there, or only something that is not meant.
    """
    kind = format_of(path)
    if kind == "unknown":
        raise InvalidInputError(
            f"{path}: there is no writing {path.suffix} files; give a name that ends in .safetensors or .pt, or one "
            "without suffix for a folder"
        )
    resolved = Path(os.path.realpath(path))
    # What is written takes the place of what is there, and nothing can take the place of the folder that we are in.
    if path.name in ("", "..") or Path.cwd().is_relative_to(resolved):
        raise InvalidInputError(f"{path} is no name for something new; give one, for instance {path / 'my-model'}")
    store = next((above for above in (resolved, *resolved.parents) if os.path.exists(above / DESCRIPTOR_NAME)), None)
    if store is not None:
        what = "is a store" if store == resolved else f"lies in the store {store}"
        raise InvalidInputError(f"{path} {what}, where only asymcheck's own files belong; name another place")
    if os.path.isdir(path) and kind != "folder":
        raise InvalidInputError(f"{path} is a folder, and a {path.suffix} file is to be written; give another name")
    if os.path.isfile(path) and kind == "folder":
        raise InvalidInputError(
            f"{path} is a file, and a name without .safetensors or .pt stands for a folder; give another name"
        )
    return kind
