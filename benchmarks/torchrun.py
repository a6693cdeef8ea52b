"""Run the ranks of a workload: real processes, started by torchrun, that communicate over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def run_ranks(ranks: int, module: str, action: str, folder: Path, *parameters: object) -> dict[str, Any]:
    """Run ``module`` with ``action``, ``folder`` and ``parameters``; return the content of ``action.json``.

    Raises:
        RuntimeError: the module failed, or a library restored a state that differs from the saved state.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # Set the default number of threads explicitly. Otherwise, torchrun prints a warning on standard error.
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    done = subprocess.run(
        [*launch, "-m", module, action, str(folder), *map(str, parameters)],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{action} by {ranks} ranks failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads((folder / f"{action}.json").read_text())
    return result
