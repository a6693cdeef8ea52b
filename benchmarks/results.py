"""``make report``: run all workloads on the quick grid, and write tables, plots and raw figures to docs/results.

``python -m benchmarks.results [--folder DIR] [--full] [--only WORKLOAD …]``. Workloads that
are not run keep their figures. The report lists each measure in which asymcheck is not first, with a likely cause that
is known from the code, but not measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.report import Report, Row, read_json
from benchmarks.schemes import SCHEMES

TARGET = Path(__file__).parents[1] / "docs" / "results"
WORKLOADS = (
    *(
        "models",
        "goodput",
        "durable",
        "restore",
        "small",
        "stall",
        "gpu",
        "batch",
        "codec",
        "bytes",
        "catalog",
        "memory",
    ),
    *("ranks", "reshard", "dedupe", "hdfs"),
)
OURS = "asymcheck +S+O"
EVERY = 10
_MEASURES = (
    ("slowdown", "x", f", every {EVERY}"),
    ("visible stall p95", "ms", f", every {EVERY}"),
    ("time to durable", "ms", f", every {EVERY}"),
    ("recovery", "ms", ""),
    ("bytes a checkpoint", "MB", f", every {EVERY}"),
)
_CAUSES: Mapping[str, str] = {
    "slowdown": "With two cores, the threads that capture, digest and write take time from the training's core. "
    "More cores, or a larger model, would make their share smaller.",
    "visible stall p95": "A `step()` walks, plans and samples the state in Python: some milliseconds at any size. "
    "A plain copy of a few MB takes less. asymcheck is faster from some hundred MB on.",
    "time to durable": "Background writers run at nice 19 and fsync the index, the catalog and the manifest besides "
    "the bytes. For a few MB that is most of the time. asymcheck is faster from some hundred MB on.",
    "recovery": "Recovery has a fixed cost of some 50 ms. After a kill asymcheck rebuilds the catalog from the packs "
    "(a third of the time, with two dozen packs), reads and checks the manifest, matches each tensor, opens a "
    "generation durably, and compares every digest. The other libraries map a file. The digests find flipped bits, "
    "and the fixed cost matters less for larger states.",
    "bytes a checkpoint": "Frames are aligned to 4 KiB, and manifest, index and catalog need some percent "
    'of a few MB. Nothing is compressed where the drive is faster than the codec (`compression="smallest"` does it).',
}
_AIMS: Mapping[str, Mapping[str, tuple[Literal["≥", "≤"], float]]] = {
    "durable": {
        "durable_new/limit": ("≥", 0.9),
        "durable_recycled/limit": ("≥", 0.9),
        "durable_new/best_peer": ("≥", 1),
    },
    "restore": {"restore/limit": ("≥", 0.85), "restore/best_peer": ("≥", 1), "restore_fresh/best_peer": ("≥", 1)},
    "small": {"durable/torch_save": ("≤", 1.2), "recovery/torch_load": ("≤", 2)},
    "stall": {
        "stall_p95/best_peer": ("≤", 0.1),
        "slowdown_every_10": ("≤", 1.02),
        "slowdown_every_10_of_1024_tokens": ("≤", 1.02),
    },
    "gpu": {
        "slowdown_every_10": ("≤", 1.01),
        "capture/limit": ("≥", 0.95),
        "restore/limit": ("≥", 0.9),
        "restore/best_peer": ("≥", 1),
    },
    "batch": {"batch_time_at_Bstar/best": ("≤", 1.1)},
    "codec": {
        "ratio_mixed_state_single": ("≥", 1.4),
        "ratio_mixed_state_10_apart": ("≥", 1.5),
        "ratio/zipnn": ("≥", 0.98),
        "encode_speed/zipnn": ("≥", 0.8),
    },
    "bytes": {"bytes_lora/torch_save": ("≤", 0.1), "time_to_durable_with/without_policy": ("≤", 1.05)},
    "ranks": {"commit_s_at_16384": ("≤", 10), "resolve_s_at_16384": ("≤", 10)},
    "reshard": {"reshard_time/dcp": ("≤", 1)},
    "dedupe": {"bytes_ddp4/dcp": ("≤", 1.01), "save_time_fsdp4/dcp": ("≤", 1)},
    "hdfs": {
        "push/raw_put": ("≥", 0.9),
        "push/raw_put_3_replicas": ("≥", 0.9),
        "restore/raw_get": ("≥", 0.9),
        "restore/raw_get_3_replicas": ("≥", 0.9),
        "slowdown_while_pushing": ("≤", 1.02),
    },
}
"""Targets by workload and ratio."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the workloads, one process each, and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--folder", type=Path, help="measure the file system of this folder")
    parser.add_argument("--full", action="store_true", help="run the full grid, which takes hours")
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=WORKLOADS, help="run only these workloads")
    parser.add_argument(
        "--target", type=Path, help="folder of the reports [default: docs/results, or docs/results/full]"
    )
    arguments = parser.parse_args(argv)
    arguments.target = arguments.target or (TARGET / "full" if arguments.full else TARGET)
    arguments.target.mkdir(parents=True, exist_ok=True)
    for workload in arguments.only:
        print(f"--- {workload}", flush=True)
        command = [sys.executable, "-m", "benchmarks", *_options(workload, arguments)]
        if subprocess.run(command, check=False).returncode:
            # Continue, because some workloads need more than the package. For example, hdfs needs Java.
            print(f"--- {workload} was left out", flush=True)
    write_page(arguments.target, full=arguments.full)


def _options(workload: str, arguments: argparse.Namespace) -> Iterator[str]:
    target: Path = arguments.target
    yield from (workload, "--json", str(target / f"{workload}.json"), "--plot", str(target / f"{workload}.png"))
    if not arguments.full:
        yield "--quick"
    if arguments.folder is not None:
        yield from ("--folder", str(arguments.folder))
    if workload == "goodput":
        yield from ("--from", str(target / "models.json"))


def write_page(target: Path, *, full: bool) -> None:
    """Write README.md from the reports in the same folder."""
    reports = {name: read_json(target / f"{name}.json") for name in WORKLOADS if (target / f"{name}.json").exists()}
    manual = os.path.relpath(TARGET.parent / "benchmarks.md", target)
    (target / "README.md").write_text("\n".join(_page(reports, manual, full=full)) + "\n")


def _page(reports: Mapping[str, Report], manual: str, *, full: bool) -> Iterator[str]:
    command = f"python -m benchmarks.results --full --only {' '.join(reports)}" if full else "make report"
    yield "# Results at full size" if full else "# Results"
    yield ""
    yield f"Written by `{command}`; [benchmarks.md]({manual}) describes each workload and how to read its figures."
    yield "Compare ratios of one run, never absolute figures of two machines."
    yield from _aims(reports, full=full)
    for name, report in reports.items():
        yield from ("", f"## {name}", "")
        yield " · ".join(f"{key}: {value}" for key, value in report.environment.items() if key != "peers")
        yield ""
        if name == "models":
            yield from _models(report)
        elif name == "goodput":
            yield from _goodput(report)
        yield from ("| ratio | |", "|---|---|")
        yield from (f"| `{key}` | {value:.3g} |" for key, value in report.ratios.items())
        yield from ("", f"![{name}]({name}.png) [all figures]({name}.json)")


def _aims(reports: Mapping[str, Report], *, full: bool) -> Iterator[str]:
    """Yield the table of targets and measured values, missed targets first."""
    measured = [
        (name, ratio, sign, aim, reports[name].ratios[ratio])
        for name, aims in _AIMS.items()
        for ratio, (sign, aim) in aims.items()
        if name in reports and ratio in reports[name].ratios
    ]
    if not measured:
        return
    yield from ("", "## Targets", "")
    yield "The targets are for states of full size on a quiet machine" + (
        "." if full else "; `--quick` takes small states, for which fixed costs weigh more."
    )
    yield from ("", "| | ratio | target | measured |", "|---|---|---|---|")
    for name, ratio, sign, aim, value in sorted(measured, key=lambda target: _is_reached(*target[2:])):
        mark = "reached" if _is_reached(sign, aim, value) else "**missed**"
        yield f"| {mark} | `{ratio}` of [{name}](#{name}) | {sign} {aim:g} | {value:.3g} |"


def _is_reached(sign: str, aim: float, value: float) -> bool:
    return value >= aim if sign == "≥" else value <= aim


def _models(report: Report) -> Iterator[str]:
    models = list(dict.fromkeys(_model(row) for row in report.results if row.metric.startswith("steps lost")))
    schemes = list(dict.fromkeys(row.system for row in report.results))
    rows = {(row.system, row.metric): row for row in report.results}
    for metric, unit, suffix in _MEASURES:
        yield from (f"**{metric}** [{unit}], median (minimum to maximum); less is better", "")
        yield f"| scheme | {' | '.join(models)} |"
        yield "|---|" + "---|" * len(models)
        for scheme in schemes:
            cells = [_cell(rows.get((scheme, f"{metric}, {model}{suffix}"))) for model in models]
            yield f"| {scheme} | {' | '.join(cells)} |"
        yield ""
    yield from _inexact(report, models)
    yield from _losses(report, models)


def _model(row: Row) -> str:
    return row.metric.split(", ")[1]


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.median:.3g}" + (f" ({row.min:.3g} to {row.max:.3g})" if row.n > 1 else "")


def _inexact(report: Report, models: Sequence[str]) -> Iterator[str]:
    """Yield the schemes whose restored state was not bit-exact: torn, cut short by the kill, or lossy by design."""
    yield from ("**Schemes that did not restore the state bit for bit** after each kill:", "")
    rows = {(row.system, row.metric): row for row in report.results}
    found = False
    for scheme in dict.fromkeys(row.system for row in report.results):
        shares = {model: rows.get((scheme, f"bit-exact, {model}")) for model in models}
        short = [
            f"{model} ({'at times' if row.max else 'never'})"
            for model, row in shares.items()
            if row is not None and row.min < 1
        ]
        if short:
            yield f"- {scheme}: {', '.join(short)}"
            found = True
    yield from ("" if found else "None.", "")


def _losses(report: Report, models: Sequence[str]) -> Iterator[str]:
    """Yield the measures in which an exact upstream library is better, with the likely cause."""
    rivals = [scheme.name for scheme in SCHEMES if scheme.kind == "upstream"]
    rows = {(row.system, row.metric): row.median for row in report.results}
    yield from ("**Measures in which asymcheck is not first** against unchanged libraries:", "")
    yield from ("| measure | models | likely cause and remedy |", "|---|---|---|")
    for metric, unit, suffix in _MEASURES:
        lost = []
        for model in models:
            label = f"{metric}, {model}{suffix}"
            # Libraries that sometimes restored a wrong state, or none, are not compared.
            exact = [name for name in rivals if rows.get((name, f"bit-exact, {model}"), 1.0) == 1.0]
            peers = {name: rows[name, label] for name in exact if (name, label) in rows}
            ours = rows.get((OURS, label))
            if ours is not None and peers and min(peers.values()) < ours:
                best = min(peers, key=lambda name: peers[name])
                lost.append(f"{model}: {ours:.3g} {unit}, {best} {peers[best]:.3g}")
        if lost:
            yield f"| {metric} | {'; '.join(lost)} | {_CAUSES[metric]} |"
    yield ""


def _goodput(report: Report) -> Iterator[str]:
    scenes = list(dict.fromkeys(row.metric for row in report.results if row.metric.startswith("goodput, ")))
    yield f"| scheme | {' | '.join(scene.removeprefix('goodput, ') for scene in scenes)} |"
    yield "|---|" + "---|" * len(scenes)
    rows = {(row.system, row.metric): row for row in report.results}
    for scheme in dict.fromkeys(row.system for row in report.results):
        cells = [rows.get((scheme, scene)) for scene in scenes]
        yield f"| {scheme} | {' | '.join(f'{row.median:.2f} %' if row else '-' for row in cells)} |"
    yield ""


if __name__ == "__main__":
    main()
