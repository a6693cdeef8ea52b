"""Where a checkpoint may be written to: what a name stands for, and which places are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from asymcheck.arguments import check_no_uri
from asymcheck.errors import InvalidInputError
from asymcheck.format.layout import DESCRIPTOR_NAME
from asymcheck.tiers.files import translated

_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
# Meant for a file; a suffix that begins with a digit is a part of names like llama-3.1.
_A_SUFFIX = re.compile(r"\.[^\W\d_]\w*")


def format_of(path: Path) -> str:
    """Return the format that a name stands for: ``safetensors``, ``torch``, ``unknown``, or else ``folder``.

    A folder that is there is one, whatever its suffix, unless that is one of the known.
    """
    suffix = path.suffix.lower()
    if suffix == _SAFETENSORS:
        return "safetensors"
    if suffix in _TORCH:
        return "torch"
    return "unknown" if _A_SUFFIX.fullmatch(suffix) and not os.path.isdir(path) else "folder"


def is_store(path: Path) -> bool:
    """Tell whether there is a store.

    Raises:
        InvalidInputError: that is a URI.
        StorageError: this user may not look there.
    """
    check_no_uri(path)
    with translated("look at", path):
        return (path / DESCRIPTOR_NAME).exists()


def check_target(path: Path) -> str:
    """Return the format of a place to write to.

    Raises:
        InvalidInputError: nothing can be written there, or only something that is not meant.
    """
    check_no_uri(path)
    kind = format_of(path)
    if kind == "unknown":
        raise InvalidInputError(
            f"{path}: there is no writing {path.suffix} files; give a name that ends in "
            f"{', '.join((_SAFETENSORS, *_TORCH))}, or one without suffix for a folder"
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
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise InvalidInputError(f"{path} is no file and no folder, so it is not replaced; give another name")
    if os.path.islink(path) and kind == "folder":
        raise InvalidInputError(
            f"{path} is a link, and no folder can take its place; name what it leads to: {resolved}"
        )
    if os.path.isfile(path) and kind == "folder":
        raise InvalidInputError(
            f"{path} is a file, and a name without .safetensors or .pt stands for a folder; give another name"
        )
    return kind
