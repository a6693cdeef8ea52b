"""Test names: formatting and parsing are inverse, and names sort by age."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.errors import InvalidInputError
from asymcheck.format import layout, registry
from asymcheck.format.layout import ManifestName
from asymcheck.types import CheckpointRef, Digest, PackId, SaveId

ids = st.binary(min_size=16, max_size=16)
refs = st.builds(
    CheckpointRef,
    st.integers(1, registry.GENERATION_MAX),
    st.integers(0, registry.STEP_MAX),
    ids.map(SaveId),
)


@given(refs)
def test_checkpoints_go_round(ref: CheckpointRef) -> None:
    """Test that the directory name identifies the checkpoint."""
    assert layout.parse_checkpoint_name(layout.checkpoint_name(ref)) == ref


@given(refs, refs)
def test_checkpoint_names_sort_as_checkpoints_do(one: CheckpointRef, other: CheckpointRef) -> None:
    """Test that a sorted listing is in order of generation, step and save id."""
    assert (layout.checkpoint_name(one) < layout.checkpoint_name(other)) == (one < other)


@given(st.data(), ids)
def test_manifests_go_round(data: st.DataObject, digest: bytes) -> None:
    """Test that the file name has rank, world size and digest."""
    world_size = data.draw(st.integers(1, registry.WORLD_SIZE_MAX))
    name = ManifestName(data.draw(st.integers(0, world_size - 1)), world_size, Digest(digest))
    assert layout.parse_manifest_name(str(name)) == name


@given(ids.map(PackId), st.integers(1, registry.GENERATION_MAX))
def test_packs_and_heads_go_round(pack_id: PackId, generation: int) -> None:
    """Test the names of packs and head records, and of an unfinished pack, which is not a pack."""
    assert layout.parse_pack_name(layout.pack_name(pack_id)) == pack_id
    assert layout.parse_head_name(layout.head_name(generation)) == generation
    assert layout.parse_lease_name(layout.lease_name(generation)) == generation
    unfinished = layout.pack_temporary_name(pack_id)
    assert layout.is_pack_temporary(unfinished)
    assert layout.parse_pack_name(unfinished) is None
    assert unfinished.endswith(layout.TEMPORARY)
    doomed = layout.doomed_name(pack_id, bytes(16))
    assert layout.parse_doomed_name(doomed) == pack_id
    assert layout.parse_pack_name(doomed) is None
    assert layout.parse_doomed_name(layout.pack_name(pack_id)) is None


@given(st.text(max_size=80))
def test_parsing_is_strict(name: str) -> None:
    """Test that for any text, the parsed result formats to the same text."""
    pack_id, generation = layout.parse_pack_name(name), layout.parse_head_name(name)
    ref, manifest = layout.parse_checkpoint_name(name), layout.parse_manifest_name(name)
    lease = layout.parse_lease_name(name)
    made = [
        None if lease is None else layout.lease_name(lease),
        None if pack_id is None else layout.pack_name(pack_id),
        None if generation is None else layout.head_name(generation),
        None if ref is None else layout.checkpoint_name(ref),
        None if manifest is None else str(manifest),
    ]
    assert set(made) <= {None, name}


@given(st.from_regex(r"\A[0-9a-f+ _-]{0,34}(\.pack|\.head|\.lease|\.manifest)?\n?\Z"))
def test_similar_names_are_refused(name: str) -> None:
    """Test signs, underscores and line feeds that int() or a regex would accept."""
    test_parsing_is_strict.hypothesis.inner_test(name)  # type: ignore[attr-defined]  # hypothesis adds it


@pytest.mark.parametrize("run", ["r", "gpt2-run1", "A.b_c-9", "z" * 64])
def test_runs_that_can_be_names(run: str) -> None:
    """Test that the name of a run is returned unchanged."""
    assert layout.check_run(run) == run
    assert layout.is_run(run)


@pytest.mark.parametrize(
    "run", ["", "z" * 65, ".", "..", "a/b", "../a", "-r", "_r", "a b", "käse", "r\n", "r\0", "r.tmp"]
)
def test_runs_that_cannot(run: str) -> None:
    """Test names that leave the folder, are hidden or temporary; the error states the rule."""
    assert not layout.is_run(run)
    with pytest.raises(InvalidInputError, match="run name"):
        layout.check_run(run)
