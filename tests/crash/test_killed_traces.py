"""Test that the trace of a killed training can be opened."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

import asymcheck
from tests.crash.trainer import train
from tests.zygote import Zygote, wait_until


def train_traced(path: str) -> None:
    """Train with a trace until killed."""
    with asymcheck.trace(Path(path) / "trace.json"):
        train(path)


@pytest.mark.slow(quick=["1"])
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_trace_lacks_only_the_bracket(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    """Test that every line is complete, and that durable checkpoints have all their events."""
    path = tmp_path / "trace.json"
    child = zygote.start(train_traced, path=str(tmp_path))
    wait_until(lambda: path.exists() and b'"cat":"checkpoint"' in path.read_bytes(), "the first checkpoint")
    time.sleep(random.Random(seed).uniform(0, 0.1))
    child.kill()
    child.wait_killed()
    records = json.loads(path.read_text("utf-8") + "\n]")
    assert len(path.read_text("utf-8").splitlines()) == len(records) + 1
    durable = {
        record["args"]["step"] for record in records if record.get("cat") == "checkpoint" and record["ph"] == "b"
    }
    assert 0 in durable
    for step in durable:
        of_step = [record for record in records if record.get("args", {}).get("step") == step]
        assert {"copy", "digest", "write", "commit"} <= {record["cat"] for record in of_step}
