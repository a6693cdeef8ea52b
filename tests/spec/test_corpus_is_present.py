"""The corpus is large enough to mean something, in pairs, and made by the tool that says so."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from asymcheck import errors
from tests.spec.corpus import FORMAT_SPEC, READERS, STRUCTURES, VECTORS, vectors
from tools.make_vectors import all_vectors
from tools.vectors_base import write_vectors

FEWEST = {"record": 8, "frame": 8, "pack": 5, "manifest": 14, "tree": 55, "catalog": 24, "layout": 43, "ring": 20}
FEWEST |= {"codec": 34}
FEWEST_INVALID = {"frame": 74, "pack": 168, "manifest": 182, "descriptor": 40, "head": 18, "tree": 86, "ring": 35}


@pytest.mark.parametrize("folder", [*STRUCTURES, "invalid"])
def test_vectors_come_in_pairs(folder: str) -> None:
    """Every vector has its bytes and its meaning; nothing else lies in the folder."""
    names = sorted(path.name for path in (VECTORS / folder).iterdir())
    pairs = [f"{vector.name}.{ending}" for vector in vectors(folder) for ending in ("bin", "json")]
    assert names == sorted(pairs)


@pytest.mark.parametrize(("folder", "fewest"), FEWEST.items())
def test_enough_well_formed_vectors(folder: str, fewest: int) -> None:
    """A missing folder would make all tests over it pass."""
    assert len(vectors(folder)) >= fewest


@pytest.mark.parametrize(("structure", "fewest"), FEWEST_INVALID.items())
def test_enough_malformed_vectors(structure: str, fewest: int) -> None:
    """One for every rule of each structure."""
    assert sum(vector.facts["structure"] == structure for vector in vectors("invalid")) >= fewest
    assert set(FEWEST_INVALID) == set(READERS)


def test_every_format_error_has_a_vector() -> None:
    """Each kind of FormatError is the answer to at least one vector; no vector names a kind that does not exist."""
    assert {vector.facts["error_kind"] for vector in vectors("invalid")} == _kinds(errors.FormatError)


def _kinds(error: type[errors.FormatError]) -> set[str]:
    """The kinds of the errors that are raised: classes in between only group them."""
    below = error.__subclasses__()
    return set().union(*map(_kinds, below)) if below else {error.kind}


@pytest.mark.slow
def test_the_vectors_are_reproducible(tmp_path: Path) -> None:
    """The tool makes the same files again; manifests only with the same version of Arrow, whose writer made them.

    So do rings with captures, in which manifests lie.
    """
    write_vectors(all_vectors(), tmp_path)
    with_arrow = f"pyarrow {pa.__version__}" in (FORMAT_SPEC / "PROVENANCE.md").read_text("utf-8")
    for made in (tmp_path, VECTORS):
        files = {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
        assert files == {path.relative_to(VECTORS) for path in VECTORS.rglob("*") if path.is_file()}
    for path in sorted(tmp_path.rglob("*.*")):
        relative = path.relative_to(tmp_path)
        if with_arrow or not ("manifest" in relative.as_posix() or relative.parent.name == "ring"):
            assert path.read_bytes() == (VECTORS / path.relative_to(tmp_path)).read_bytes(), path.name
    shutil.rmtree(tmp_path)


def test_the_json_is_ascii_and_sorted() -> None:
    """The JSON files are written one way, so that a change of the corpus is a change of meaning."""
    for path in VECTORS.rglob("*.json"):
        text = path.read_text("ascii")
        assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
