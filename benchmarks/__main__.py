"""Run a workload: ``python -m benchmarks WORKLOAD [--quick] [--json FILE] [--plot FILE.png] [--folder DIR]``.

``python -m benchmarks compare OLD.json NEW.json`` lists metrics that became worse; its exit status is then 1.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import compare, environment
from benchmarks.plot import draw
from benchmarks.report import UnreadableReportError, print_environment, print_report, write_json

WORKLOADS = (
    "durable",
    "restore",
    "small",
    "catalog",
    "memory",
    "stall",
    "link",
    "gpu",
    "batch",
    "codec",
    "bytes",
    "hdfs",
    "objects",
    "publish",
    "merge",
    "reshard",
    "dedupe",
    "ranks",
    "models",
    "goodput",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, print the environment, measure, print."""
    argv_list = list(sys.argv[1:] if argv is None else argv)
    if argv_list[:1] == ["compare"]:
        parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=compare.__doc__)
        parser.add_argument("old", type=Path, help="an earlier report, as --json writes it")
        parser.add_argument("new", type=Path, help="a later report of the same workload")
        both = parser.parse_args(argv_list[1:])
        try:
            raise SystemExit(compare.main(both.old, both.new))
        except UnreadableReportError as error:
            # Status 1 is reserved for metrics that became worse.
            parser.error(str(error))
    arguments = _parsed(argv_list)
    print_environment(environment.describe(arguments.folder or Path(tempfile.gettempdir())))
    more = {"gigabytes": arguments.size, "source": arguments.source, "model": arguments.model, "trace": arguments.trace}
    more["cells"] = arguments.cells
    workload = importlib.import_module(f"benchmarks.{arguments.workload}")
    known = {name: value for name, value in more.items() if value is not None}
    try:
        report = workload.run(arguments.folder, quick=arguments.quick, **known)
    except UnreadableReportError as error:
        sys.exit(f"python -m benchmarks {arguments.workload}: {error}")
    print_report(report)
    if arguments.json is not None:
        write_json(report, arguments.json)
    if arguments.plot is not None:
        draw(report, arguments.plot)


def _listed() -> str:
    """Return a line for each workload, from its docstring. Modules are parsed, not imported: some need extras."""
    lines = ["workloads:"]
    for name in WORKLOADS:
        source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
        first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:<8} {first.removeprefix(f'``{name}``: ').replace('``', '')}")
    return "\n".join(lines)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=_listed(), formatter_class=as_written
    )
    parser.add_argument("workload", choices=WORKLOADS, metavar="WORKLOAD", help="one of the workloads below")
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes and few rounds: a functional check, not a measurement"
    )
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--plot", type=Path, help="also plot medians, minima and maxima into this PNG file")
    parser.add_argument(
        "--folder", type=Path, help="measure in this folder's file system [default: the temporary folder]"
    )
    parser.add_argument("--size", type=float, metavar="GB", help="for `gpu` only: size of the state [default: 14]")
    parser.add_argument("--cells", type=Path, help="for `models` only: keep finished cells here, and continue there")
    parser.add_argument("--from", dest="source", type=Path, help="for `goodput` only: a report of `models`")
    parser.add_argument("--model", help="for `models`: only this model; for `goodput`: model of the report")
    parser.add_argument("--trace", type=Path, help="for `goodput` only: also replay the failures of this file")
    arguments = parser.parse_args(argv)
    if arguments.size is not None and (arguments.workload != "gpu" or arguments.size <= 0):
        parser.error("--size is a positive number, and for the workload gpu")
    if arguments.folder is not None and not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is no folder")
    if arguments.cells is not None and arguments.workload != "models":
        parser.error("--cells is for the workload models")
    if (arguments.source or arguments.trace) and arguments.workload != "goodput":
        parser.error("--from and --trace are for the workload goodput")
    if arguments.model is not None and arguments.workload not in ("goodput", "models"):
        parser.error("--model is for the workloads goodput and models")
    if arguments.workload == "goodput" and arguments.source is None:
        parser.error("goodput needs what `models --json FILE` has measured: --from FILE")
    return arguments


if __name__ == "__main__":
    main()
