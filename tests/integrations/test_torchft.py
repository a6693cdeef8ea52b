"""Test the example of docs/trainers.md for torchft: replica groups that heal save what their peers save."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asymcheck import Store
from tests.docs.pages import blocks_of
from tests.integrations.launch_ranks import LIMIT_S, ROOT
from tests.store.equality import assert_same

pytest.importorskip("torchft.coordination", reason="torchft is not installed")
STEPS, EVERY, NEVER = 30, 5, 0


class Groups:
    """Two replica groups. A group that ends with an error is started again, as a launcher does."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        """Write the example, which trains only while both groups are there."""
        self._folder, self._lighthouse = folder, lighthouse
        text = (ROOT / "docs" / "trainers.md").read_text()
        (example,) = (block.body for block in blocks_of(text) if block.file == "train_torchft.py")
        assert "min_replica_size=1," in example
        (folder / "train_torchft.py").write_text(example.replace("min_replica_size=1,", "min_replica_size=2,"))

    def start(self, group: int, kill_at: int = NEVER, miss: int = NEVER) -> subprocess.Popen[bytes]:
        """Start a group that fails at these steps."""
        program = [str(self._folder / "train_torchft.py"), str(group), str(self._folder / "store"), str(STEPS)]
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHFT_LIGHTHOUSE": self._lighthouse}
        with (self._folder / f"log-{group}").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.integrations.torchft_group", *program, str(miss), str(kill_at)],
                env={**os.environ, **own},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def run(self, *failures: dict[str, int]) -> list[list[int]]:
        """Train to the end; return the exit statuses of each group."""
        groups = [self.start(group, **failure) for group, failure in enumerate(failures)]
        ended: list[list[int]] = [[], []]
        limit = time.monotonic() + LIMIT_S
        try:
            while not all(statuses[-1:] == [0] for statuses in ended):
                assert time.monotonic() < limit, (self._folder / "log-0").read_text()[-6000:]
                time.sleep(0.05)
                for number, group in enumerate(groups):
                    if ended[number][-1:] != [0] and (status := group.poll()) is not None:
                        ended[number].append(status)
                        if status:
                            groups[number] = self.start(number)
        finally:
            for group in groups:
                group.kill()
                group.wait()
        return ended


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    """Return two groups, and the server by which they find each other."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    yield Groups(tmp_path, lighthouse.address())
    lighthouse.shutdown()


def check(store: Store) -> list[set[int]]:
    """Check that both groups have equal checkpoints, one of each step; return the generations of each group."""
    assert store.verify() == []
    checkpoints = [store.checkpoints(f"group-{group}") for group in range(2)]
    for saved in checkpoints:
        assert [one.step for one in saved][-3:] == [20, 25, 30]
    for step in (20, 25, 30):
        one, other = (store.load(step, run=f"group-{group}") for group in range(2))
        assert_same({**one, "rng": None}, {**other, "rng": None})
        assert one["manager"]["step"] == step
    return [{one.generation for one in saved} for saved in checkpoints]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failures", "expected", "generations"),
    [
        # The killed group restores step 15, and heals to the step of the other group.
        (({}, {"kill_at": 18}), [[0], [-signal.SIGKILL, 0]], [{1}, {2}]),
        # Both groups restore other steps than they had reached.
        (({"kill_at": 17}, {"kill_at": 17}), [[-signal.SIGKILL, 0]] * 2, [{2}, {2}]),
        # The group that misses a step heals while its last checkpoint is being copied.
        (({}, {"miss": 21}), [[0], [0]], [{1}, {1}]),
    ],
    ids=["killed", "both-killed", "missed"],
)
def test_a_group_that_heals_saves_what_its_peer_saves(
    failures: tuple[dict[str, int], ...],
    expected: list[list[int]],
    generations: list[set[int]],
    groups: Groups,
    tmp_path: Path,
) -> None:
    """Test that no group commits a step twice, or with other weights than its peer."""
    assert groups.run(*failures) == expected
    with Store.open(tmp_path / "store") as store:
        assert check(store) == generations
