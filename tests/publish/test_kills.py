"""Test SIGKILL of publishers and subscribers at random moments: no mixture, and never an older release."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.fsck.verify import Severity
from tests.publish.loops import follow_for_ever, publish_for_ever
from tests.zygote import Child, Zygote, wait_until

LONGEST_S = 0.3
"""Seconds, longer than publishing and following one release."""


def _numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _seen(folder: Path, subscribers: Iterable[int]) -> list[int]:
    return [number for name in subscribers for number in _numbers(folder / f"seen-{name}")]


def _start(zygote: Zygote, folder: Path, location: str, role: int, number: int, dice: random.Random) -> Child:
    where = {"folder": str(folder), "location": location}
    if role == 0:
        return zygote.start(publish_for_ever, full_every=dice.choice([1, 3, 8]), **where)
    buffering = dice.choice(["double", "single"])
    return zygote.start(
        follow_for_ever, seen=f"seen-{number}", prefetch=dice.random() < 0.5, buffering=buffering, **where
    )


def _kill_repeatedly(zygote: Zygote, folder: Path, location: str, kills: int, seed: int) -> None:
    """Run a publisher and two subscribers, kill one of them at a time, and start it again.

    Subscribers check each of their weights after each update. A new one begins without a release.
    """
    dice = random.Random(seed)
    running = [_start(zygote, folder, location, role, role, dice) for role in range(3)]
    published, floors = folder / "published", {1: 0, 2: 0}
    wait_until(lambda: bool(_numbers(published)), "the first release")
    for number in range(3, 3 + kills):
        time.sleep(dice.uniform(0, LONGEST_S))
        role = dice.randrange(3)
        running[role].kill()
        running[role].wait_killed()
        before = len(_numbers(published)), len(_seen(folder, floors))
        if role:
            # The next subscriber begins later, so that its first release must not be older than any seen now.
            floors[number] = max(_seen(folder, floors), default=0)
        running[role] = _start(zygote, folder, location, role, number, dice)
        if dice.random() < 0.3:
            wait_until(lambda old=before[0]: len(_numbers(published)) > old, "a release after the kill")
            wait_until(lambda old=before[1]: len(_seen(folder, floors)) > old, "an update after the kill")
    last = _numbers(published)[-1]
    running[0].kill()
    running[0].wait_killed()
    with Store.open(location, read_only=True) as opened:
        newest = max(row.step for row in opened.checkpoints("release"))
        assert newest >= last
        assert [found for found in opened.verify() if found.severity is not Severity.HINT] == []
    for child in running[1:]:
        child.kill()
        child.wait_killed()
    numbers = _numbers(published)
    assert numbers == sorted(set(numbers)), "a number was published twice, or went back"
    for name, floor in floors.items():
        seen = _numbers(folder / f"seen-{name}")
        assert seen == sorted(set(seen)), f"subscriber {name} went back: {seen}"
        assert not seen or seen[0] >= floor, f"subscriber {name} began with release {seen[0]}, older than {floor}"


@pytest.mark.slow
def test_kills_show_no_mixture_and_no_older_release(zygote: Zygote, tmp_path: Path) -> None:
    """Test some dozens of kills, with releases in a local directory."""
    _kill_repeatedly(zygote, tmp_path, str(tmp_path / "releases"), 20, seed=1)


@pytest.mark.slow
def test_kills_with_a_remote_location_show_no_mixture(zygote: Zygote, tmp_path: Path) -> None:
    """Test kills while releases are pushed to a folder that is used like a remote location."""
    _kill_repeatedly(zygote, tmp_path, f"file://{tmp_path}/releases", 6, seed=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_kills_show_no_mixture(zygote: Zygote, tmp_path: Path, seed: int) -> None:
    """Test 10,000 kills, half of them with a remote location."""
    scheme = "file://" if seed % 2 else ""
    _kill_repeatedly(zygote, tmp_path, f"{scheme}{tmp_path}/releases", 500, seed=100 + seed)
