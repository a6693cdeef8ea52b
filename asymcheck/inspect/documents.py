"""Turn results into JSON documents, as docs/schemas describes them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path


def jsonable(value: object) -> object:
    """Return a value for ``json.dumps``. Dataclasses become objects; NaN and infinities become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
