"""Launch two ranks of a training in separate processes, which are killed or run to their end."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asymcheck import Store
from tests.zygote import Zygote

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
_PROGRAM = "tests.integrations.trainer_ranks"


def by_lightning(folder: Path, what: str, *steps: int, expect: int = 0, trainer: str = "lightning") -> None:
    """Launch the other rank with Lightning, which ends both by SIGKILL when one has ended."""
    run_alone(["-m", _PROGRAM, trainer, what, str(folder), *map(str, steps)], expect)


def run_alone(words: Sequence[str], expect: int = 0, **environment: str) -> str:
    """Run ``python words...``, which starts the ranks itself; return its output."""
    # Use one thread each, and do not wait for a missing network.
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **common, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == expect, done.stderr[-6000:]
    return done.stdout


def one_is_killed(zygote: Zygote, folder: Path, words: Sequence[object], program: str = _PROGRAM) -> None:
    """Launch both ranks of a program; when one has killed itself, kill the other, as a launcher finally does."""
    ranks = zygote.start_ranks(2, program, words, folder)
    try:
        assert ranks[1].has_ended(LIMIT_S), ranks[1].output.read_text()[-6000:]
        ranks[1].wait_killed()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def compare(zygote: Zygote, folder: Path, *steps: int, trainer: str = "transformers") -> None:
    """Launch both ranks to resume, and to compare the results."""
    zygote.run_ranks(2, _PROGRAM, [trainer, "compare", folder, *steps], folder)


def reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of the ranks."""
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


def newest_pushed(folder: Path) -> int:
    """Return the newest step that is complete at the common location of the stores."""
    with Store.open((folder / "there").as_uri()) as there:
        assert not there.verify()
        return max(one.step for one in there.checkpoints() if one.complete and one.ranks == "2")
