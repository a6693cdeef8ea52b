"""JSON read strictly (SPEC.md §5): what two parsers could understand differently is refused."""

from __future__ import annotations

import json

from asymcheck.errors import StructureError


def parse_json(text: bytes, where: str) -> object:
    """Return the value of a JSON text; ``where`` names the structure in errors.

    Raises:
        StructureError: not UTF-8, a byte order mark, a key twice in one object, NaN or an infinity, a lone surrogate,
            nesting beyond what the parser takes, or no JSON at all.
    """
    try:
        value: object = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\ud" in text.lower():
            # Only an escape can bring in half a surrogate pair; such a string can be neither printed nor written again.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise StructureError(f"{where}: not JSON as the format has it: {error}") from error
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise StructureError("a JSON object has a key twice")
    return value


def _no_constant(name: str) -> object:
    raise StructureError(f"{name} is not JSON")
