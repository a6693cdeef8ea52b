"""Launch two ranks of a training in separate processes, which are killed or run to their end."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from asymcheck import Store

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", *map(str, arguments)]


def _environment(**more: object) -> dict[str, str]:
    # Use one thread each, and do not wait for a missing network.
    given = {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo", **more}
    return {**os.environ, **{name: str(value) for name, value in given.items()}}


def run(command: list[str], expect: int = 0) -> None:
    """Run the launcher, and wait for it."""
    done = subprocess.run(
        command, env=_environment(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == expect, done.stderr[-6000:]


def by_lightning(folder: Path, what: str, *steps: int, expect: int = 0) -> None:
    """Launch the other rank with Lightning, which ends both by SIGKILL when one has ended."""
    run(_command("tests.integrations.trainer_ranks", "lightning", what, folder, *steps), expect)


def by_torchrun(folder: Path, what: str, *steps: int) -> None:
    """Launch both ranks with torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    run(_command(*launcher, "tests.integrations.trainer_ranks", "transformers", what, folder, *steps))


def one_is_killed(folder: Path, step: int) -> None:
    """Launch both ranks; when one has killed itself, kill the other, as a launcher finally does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = _command("tests.integrations.trainer_ranks", "transformers", "kill", folder, step)
    ranks = []
    for rank in range(2):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environment = _environment(**names, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with (folder / f"output-{rank}.txt").open("wb") as output:
            ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output))
    try:
        assert ranks[1].wait(LIMIT_S) == -signal.SIGKILL, (folder / "output-1.txt").read_text()[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of the ranks."""
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


def newest_pushed(folder: Path) -> int:
    """Return the newest step that is complete at the common location of the stores."""
    with Store.open((folder / "there").as_uri()) as there:
        assert not there.verify()
        return max(one.step for one in there.checkpoints() if one.complete and one.ranks == "2")
