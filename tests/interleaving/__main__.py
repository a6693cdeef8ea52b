"""Run schedules, and print the first one with a problem: ``python -m tests.interleaving SCENARIO --seeds 100``.

``--order`` repeats a schedule that was printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from tests.interleaving.breaks import BREAKS
from tests.interleaving.execution import AtRandom, InOrder
from tests.interleaving.scenarios import SCENARIOS
from tests.interleaving.schedules import Template, run


def main() -> int:
    """Run the command; return 1 if a schedule has a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument("--order", help="an order instead of the seeds; the first seed only chooses the power loss")
    parser.add_argument("--without-power-loss", action="store_true", help="check only the state after the last step")
    parser.add_argument("--break", action="append", default=[], choices=BREAKS, dest="breaks", metavar="RULE")
    parser.add_argument("--steps", action="store_true", help="print all steps, also without a problem")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets decides the order of some operations.
        os.execve(  # noqa: S606 - this program again
            sys.executable, [sys.executable, "-m", __spec__.parent, *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"}
        )
    torch.set_num_threads(1)
    # The first optimizer of a process imports this module, which takes a second.
    importlib.import_module("torch._dynamo")
    base = Path(tempfile.mkdtemp(prefix="interleaving-", dir="/dev/shm"))
    try:
        template = Template(SCENARIOS[options.scenario], base / "template")
        for seed in range(options.seed, options.seed + options.seeds):
            strategy = AtRandom(seed) if options.order is None else InOrder(options.order)
            power = None if options.without_power_loss else seed
            result = run(template, base / str(seed), strategy, breaks=options.breaks, power_seed=power)
            if result.problems or options.steps:
                sys.stdout.write(f"seed {seed}\n{result.report()}\n")
            if result.problems:
                return 1
        return 0
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    sys.exit(main())
