"""Runs the ranks of a workload: real processes, started by torchrun, that find each other over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def run_ranks(ranks: int, module: str, action: str, place: Path, *words: object) -> dict[str, Any]:
    """Run ``module`` with the arguments ``action``, ``place`` and ``words``; return what it wrote to ``action.json``.

    Raises:
        RuntimeError: it failed, or one library restored something else than was saved.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # As many threads as each would get anyway; torchrun would say so on its standard error.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    done = subprocess.run(
        [*launch, "-m", module, action, str(place), *map(str, words)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{action} by {ranks} ranks failed:\n{done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads((place / f"{action}.json").read_text())
    return told
