"""Runs a workload: ``python -m benchmarks WORKLOAD [--quick] [--json FILE] [--plot FILE.png] [--folder DIR]``."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environment
from benchmarks.plot import draw
from benchmarks.report import print_environment, print_report, write_json

WORKLOADS = ("durable", "restore", "catalog", "memory", "stall")


def main(words: Sequence[str] | None = None) -> None:
    """Parse the arguments, print the environment, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: shows that it works, not how fast"
    )
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--plot", type=Path, help="also draw the medians, with least and greatest, as this PNG file")
    parser.add_argument(
        "--folder", type=Path, help="measure in this folder's file system [default: the temporary folder]"
    )
    arguments = parser.parse_args(words)
    print_environment(environment.describe(arguments.folder or Path(tempfile.gettempdir())))
    report = importlib.import_module(f"benchmarks.{arguments.workload}").run(arguments.folder, quick=arguments.quick)
    print_report(report)
    if arguments.json is not None:
        write_json(report, arguments.json)
    if arguments.plot is not None:
        draw(report, arguments.plot)


if __name__ == "__main__":
    main()
