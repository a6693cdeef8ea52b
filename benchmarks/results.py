"""``make report``: run all workloads at full size, and write the pages, pictures and raw figures of docs/results.

``python -m benchmarks.results [--folder DIR] [--only WORKLOAD …]``. The run takes hours. An interrupted run continues
where it stopped. Workloads that are not run keep their figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.results_pages import WORKLOADS, write_pages

TARGET = Path(__file__).parents[1] / "docs" / "results"
_CELLS = "models.cells.jsonl"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the workloads, one process each, and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--folder", type=Path, help="measure the file system of this folder")
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=WORKLOADS, help="run only these workloads")
    parser.add_argument("--restart", action="store_true", help="forget an interrupted run, and begin again")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the report [default: docs/results]")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test a change; needs --target")
    arguments = parser.parse_args(argv)
    if arguments.quick and arguments.target == TARGET:
        parser.error("--quick measures no states of real size: choose another folder with --target")
    arguments.target.mkdir(parents=True, exist_ok=True)
    progress = _Progress(arguments.target / "run.json", restart=arguments.restart)
    for workload in arguments.only:
        if workload not in progress.finished:
            _run(workload, arguments)
            progress.finish(workload)
    progress.end()
    write_pages(arguments.target)


class _Progress:
    """Finished workloads of a run, in a file that exists only while the run is unfinished."""

    def __init__(self, path: Path, *, restart: bool) -> None:
        self._path = path
        self.finished: list[str] = json.loads(path.read_text()) if path.exists() and not restart else []
        """Names of workloads."""
        if not path.exists() or restart:
            path.with_name(_CELLS).unlink(missing_ok=True)
        path.write_text(json.dumps(self.finished))

    def finish(self, workload: str) -> None:
        """Add a workload."""
        self.finished.append(workload)
        self._path.write_text(json.dumps(self.finished))

    def end(self) -> None:
        """Mark the run as finished."""
        self._path.unlink()


def _run(workload: str, arguments: argparse.Namespace) -> None:
    print(f"--- {workload}", flush=True)
    command = [sys.executable, "-m", "benchmarks", *_options(workload, arguments)]
    if subprocess.run(command, check=False).returncode:
        # Continue, because some workloads need more than the package. For example, hdfs needs Java.
        print(f"--- {workload} was left out", flush=True)


def _options(workload: str, arguments: argparse.Namespace) -> Iterator[str]:
    target: Path = arguments.target
    yield from (workload, "--json", str(target / f"{workload}.json"), "--plot", str(target / f"{workload}.png"))
    if arguments.quick:
        yield "--quick"
    if arguments.folder is not None:
        yield from ("--folder", str(arguments.folder))
    if workload == "goodput":
        yield from ("--from", str(target / "models.json"))
    if workload == "models":
        yield from ("--cells", str(target / _CELLS))


if __name__ == "__main__":
    main()
