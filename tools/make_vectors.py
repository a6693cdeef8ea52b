"""Make the golden vectors of ``format_spec``: ``python -m tools.make_vectors``.

Each run writes the same bytes. The frozen stores have real ids and times, so they are made only with ``--stores``, once
for each version.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tools.vectors_base import Vector, write_vectors
from tools.vectors_codecs import codec_vectors
from tools.vectors_codecs_invalid import codec_damage_vectors
from tools.vectors_damage import damage_vectors
from tools.vectors_encoded_stores import make_encoded_stores
from tools.vectors_header_invalid import header_damage_vectors
from tools.vectors_manifest import manifest_vectors
from tools.vectors_manifest_invalid import manifest_damage_vectors
from tools.vectors_names import catalog_vectors, layout_vectors
from tools.vectors_pack import frame_vectors, pack_vectors
from tools.vectors_part_stores import make_part_stores
from tools.vectors_record import record_vectors
from tools.vectors_ring import ring_vectors
from tools.vectors_stores import make_stores
from tools.vectors_tree import tree_vectors
from tools.vectors_typed_store import make_typed_stores

FORMAT_SPEC = Path(__file__).resolve().parents[1] / "format_spec"


def all_vectors() -> Iterator[Vector]:
    """Yield every vector of version 1."""
    yield from record_vectors()
    yield from frame_vectors()
    yield from pack_vectors()
    yield from damage_vectors()
    yield from manifest_vectors()
    yield from manifest_damage_vectors()
    yield from header_damage_vectors()
    yield from tree_vectors()
    yield from catalog_vectors()
    yield from layout_vectors()
    yield from ring_vectors()
    yield from codec_vectors()
    yield from codec_damage_vectors()


def main() -> None:
    """Parse the command line and make the requested vectors."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_vectors", description=__doc__)
    parser.add_argument("--out", type=Path, default=FORMAT_SPEC, help="where to write (default: format_spec)")
    parser.add_argument("--stores", action="store_true", help="make the frozen stores instead, with new ids")
    options = parser.parse_args()
    if options.stores:
        out = options.out / "stores"
        for path in [*make_stores(out), *make_encoded_stores(out), *make_typed_stores(out), *make_part_stores(out)]:
            print(path)
    else:
        count = write_vectors(all_vectors(), options.out / "vectors" / "v1")
        print(f"{count} vectors in {options.out / 'vectors' / 'v1'}")


if __name__ == "__main__":
    main()
