"""Locations: a URI names one place, or is refused with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.errors import InvalidInputError, StoreNotFoundError
from tests.remote.conftest import CONFIG, check_state


def test_a_store_is_no_location(store: Path) -> None:
    """Its catalog says what a save relies on, and nobody who takes it for a location would ask."""
    said = rf"a store that is saved to on a local drive .* give its path, {store}, instead"
    for location in (f"file://{store}", f"file://localhost{store}/"):
        with pytest.raises(InvalidInputError, match=said):
            Store.open(location, config=CONFIG)
        with Store.open(store, config=CONFIG) as opened, pytest.raises(InvalidInputError, match=said):
            opened.push(location)
    with Store.open(store, config=CONFIG) as opened:
        check_state(opened.load(), 2)


def test_a_store_that_lost_its_descriptor_is_no_place_for_a_location(store: Path) -> None:
    """It does not get another one."""
    (store / "asymcheck.store").rename(store.parent / "aside")
    with Store.open(store.parent / "other", config=CONFIG) as other:
        other.save({"x": 1}, step=1)
        with pytest.raises(StoreNotFoundError, match=r"has other files in it \(catalog\)"):
            other.push(f"file://{store}")
    assert not (store / "asymcheck.store").exists()
