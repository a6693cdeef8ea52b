"""Test that ``asymcheck doctor`` shows measurements and recommendations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asymcheck
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


def test_measures_and_advises(call: Call, store: Path) -> None:
    """Test the tables, the entries, and the message about written bytes, which comes first."""
    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"model": {"weight": torch.randn(1_500_000)}}, step=40)
    before = sorted(path.name for path in (store / "packs").iterdir())
    outcome = call("doctor", store, "--quick", "--mtbf", "3h")
    assert outcome.status == 0
    assert outcome.err.startswith("asymcheck: measuring: writes up to 76.0 MiB ")
    assert str(store) in outcome.err
    assert sorted(path.name for path in (store / "packs").iterdir()) == before
    for text in (
        "memory copy",
        "durable write of one block, median",
        "byte-planes",
        "codecs on step 40 of run default",
    ):
        assert text in outcome.out
    advice = outcome.out[outcome.out.index("advice for") :]
    assert "one failure every 3 h" in advice
    for text in ("pack_bytes ", "stall of at most ", "a checkpoint every ", "ring_bytes ", "weights float32: "):
        assert text in advice
    names: dict[str, object] = {"state": {"x": torch.zeros(1)}}
    exec(advice[advice.index("from datetime") :], names)  # noqa: S102 - a user pastes it
    checkpointer = names["checkpointer"]
    assert isinstance(checkpointer, asymcheck.Checkpointer)
    checkpointer.close()


@pytest.mark.slow
def test_an_empty_store_needs_a_size(call: Call, store_path: Path) -> None:
    """Test that --state-size is required without checkpoints."""
    asymcheck.Store.open(store_path, create=True).close()
    outcome = call("doctor", store_path, "--quick")
    assert outcome.status == 0
    assert "no checkpoints yet" in outcome.out
    assert "--state-size 1.5GB" in outcome.out
    assert "advice for" not in outcome.out
    assert call("doctor", store_path, "--quick", "--json").json["advice"] is None
    document = call("doctor", store_path, "--quick", "--state-size", "2GB", "--mtbf", "90min", "--json").json
    situation = document["advice"]["situation"]  # type: ignore[index]  # JSON
    assert (situation["state_bytes"], situation["mtbf_s"]) == (2 * 10**9, 5400)


@pytest.mark.slow
def test_a_tiny_state_leaves_nothing_to_tune(call: Call, store_path: Path) -> None:
    """Test that no tiny pack, ring or interval is recommended."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        opened.save({"w": torch.ones(4), "n": 1}, step=1)
    outcome = call("doctor", store_path, "--quick")
    assert outcome.status == 0
    assert "no tuning needed for checkpoints of 16 B" in outcome.out
    assert not any(word in outcome.out for word in ("pack_bytes", "ring_bytes", "a checkpoint every"))
    assert call("doctor", store_path, "--quick", "--json").json["advice"] is None


@pytest.mark.parametrize("span", ["0", "-1h", "1w", "1h30", "h", "1e3", "٣h", ""])
def test_a_span_that_is_none(call: Call, store: Path, span: str) -> None:
    """Test status 2 with valid alternatives."""
    outcome = call("doctor", store, f"--mtbf={span}")
    assert outcome.status == 2
    assert "give seconds, or a number with s, min, h or d" in outcome.err


def test_no_store_is_made(call: Call, tmp_path: Path) -> None:
    """Test status 3 for a missing store."""
    assert call("doctor", tmp_path / "none", "--quick").status == 3
    assert not (tmp_path / "none").exists()
