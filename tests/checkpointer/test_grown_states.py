"""Test states that grew during training, so that a new process has fewer entries."""

from pathlib import Path

import pytest
import torch

from asymcheck import Checkpointer, Store
from asymcheck.errors import StateDifferenceWarning, StateMismatchError


def test_grown_mappings_and_lists_are_restored(store_path: Path) -> None:
    """Test entries that the state of the new process lacks: a history, and averages by name."""

    def made() -> dict[str, object]:
        return {"w": torch.zeros(3), "kept": {"inner": {}}, "history": [], "averages": {}}

    before = made()
    with Store.open(store_path, create=True) as store:
        with Checkpointer(store, before, every=1, keep=None) as checkpointer:
            checkpointer.restore()
            before["kept"]["inner"]["a"] = 5  # type: ignore[index]  # as made() makes it
            before["history"] += [0.5, {"loss": 0.25}]  # type: ignore[operator]  # as above
            before["averages"]["w"] = torch.ones(2000)  # type: ignore[index]  # as above
            checkpointer.save(1)
        after = made()
        history = after["history"]
        with Checkpointer(store, after, every=1, keep=None) as checkpointer:
            checkpointer.restore()
        assert after["kept"] == {"inner": {"a": 5}}
        assert history == [0.5, {"loss": 0.25}]
        assert torch.equal(after["averages"]["w"], torch.ones(2000))  # type: ignore[index]  # as above
        # A partial restore returns the requested part.
        part: dict[str, dict[str, object]] = {"kept": {}}
        with pytest.warns(StateDifferenceWarning, match="kept: stored, but not in the given state: inner"):
            assert store.load(into=part) == {"kept": {}}
        with pytest.raises(StateMismatchError, match=r"history: a list of 1 is given, but a list of 2 is stored"):
            store.load(into={"history": [torch.zeros(1)]})


def test_restored_entries_keep_their_stored_order(store_path: Path) -> None:
    """Test that the order does not depend on hashes, which differ between processes and ranks."""
    names = [f"loss of epoch {number}" for number in range(9, 0, -1)]
    with Store.open(store_path, create=True) as store:
        store.save({"history": {"first": 0, **dict.fromkeys(names, 1)}, "w": torch.zeros(3)}, step=1)
        state: dict[str, object] = {"history": {"first": 0}, "w": torch.zeros(3)}
        with Checkpointer(store, state, every=1, keep=None) as checkpointer:
            checkpointer.restore()
    assert list(state["history"]) == ["first", *names]  # type: ignore[call-overload]  # as above


def test_forgotten_module_in_a_mapping_is_named(store_path: Path) -> None:
    """Test a module and an optimizer beside other objects. Copies of weights in a mapping of values are no objects."""
    nets = {name: torch.nn.Linear(2, 2) for name in "ab"}
    optimizer = torch.optim.SGD(nets["a"].parameters())
    with Store.open(store_path, create=True) as store:
        state = {"nets": {**nets, "optimizer": optimizer}, "best": {"weights": nets["a"].state_dict()}}
        store.save(state, step=1)
        given: dict[str, dict[str, object]] = {"nets": {"a": torch.nn.Linear(2, 2)}, "best": {}}
        with Checkpointer(store, given) as checkpointer, pytest.warns(StateDifferenceWarning) as caught:
            checkpointer.restore()
    (told,) = [str(warning.message) for warning in caught]
    for name in ("nets.b", "nets.optimizer"):
        assert f"{name}: a module or an optimizer is stored, but not given" in told
    assert "best" not in told
    assert given["best"].keys() == {"weights"}
