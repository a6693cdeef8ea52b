"""Test plans of ranks: replicas have equal boundaries, although each rank measures its own times."""

from __future__ import annotations

import dataclasses

from asymcheck.capture.schedule import CaptureSchedule
from asymcheck.config import CaptureConfig, StoreConfig
from asymcheck.state.partition_plan import PlanInput

LAYOUT = PlanInput((64 << 10,) * 6, ("model",) * 6, (True,) * 6)
SMALL = StoreConfig(deferred_bytes_min=4096, deferred_bytes_max=128 << 10)
RECORD = {"number": 3, "kind": "asymmetric", "windows": [["forward", 30], ["backward", 200]]}


def test_rank_uses_the_given_plan() -> None:
    """Test equal boundaries, and that the plan object stays the same until another plan arrives."""
    timing = CaptureSchedule(CaptureConfig(schedule="asymmetric"), SMALL, None, lambda _number: None)
    own = timing.plan(LAYOUT)
    led = timing.plan(LAYOUT, RECORD)
    assert led.record() == RECORD
    assert led.cut != own.cut
    assert timing.plan(LAYOUT, dict(RECORD)) is led
    other = timing.plan(LAYOUT, {**RECORD, "number": 4})
    assert other is not led
    grown = dataclasses.replace(LAYOUT, sizes=(128 << 10,) * 6)
    assert sum(one.length for one in timing.plan(grown, RECORD).cut.partitions) == 6 * 128 << 10
