"""Write the pages of the results: a summary for readers, and a page with everything that was measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.pictures import Reports, draw_summary
from benchmarks.report import Report, Row, read_json, rounded

WORKLOADS = (
    *("stall", "link", "durable", "restore", "small", "gpu", "models", "goodput", "batch", "codec", "bytes", "catalog"),
    *("memory", "ranks", "reshard", "dedupe", "hdfs", "objects", "publish", "merge"),
)
"""Workloads of a report, in the order of its pages."""
_MANUAL = Path(__file__).parents[1] / "docs" / "benchmarks.md"
EVERY = 10
_ONE_MODEL = "models-gpt2"
"""Report of ``models --model GPT-2``, a separate run with more schemes and intervals."""
_MEASURES = (
    ("slowdown", "x", f", every {EVERY}"),
    ("visible stall p95", "ms", f", every {EVERY}"),
    ("time to durable", "ms", f", every {EVERY}"),
    ("recovery", "ms", ""),
    ("bytes a checkpoint", "MB", f", every {EVERY}"),
)
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
    "publish": {
        "full_bytes/release_bytes_1e-5": ("≥", 10),
        "full_bytes/release_bytes_1e-6": ("≥", 40),
        "file_latency/publish_latency": ("≥", 5),
        "pause_p95/file_load": ("≤", 0.1),
    },
    "merge": {"merge/raw_io": ("≤", 1.15), "merge/mergekit": ("≤", 1), "memory_gb": ("≤", 1)},
    "bytes": {"bytes_lora/torch_save": ("≤", 0.1), "time_to_durable_with/without_policy": ("≤", 1.05)},
    "ranks": {"commit_s_at_16384": ("≤", 10), "resolve_s_at_16384": ("≤", 10)},
    "reshard": {"reshard_time/dcp": ("≤", 1)},
    "dedupe": {"bytes_ddp4/dcp": ("≤", 1.01), "save_time_fsdp4/dcp": ("≤", 1)},
    "models": {
        "stall_p95/best_peer_every_10": ("≤", 0.1),
        "slowdown_every_10": ("≤", 1.04),
        "slowdown/best_peer_every_10": ("≤", 1),
        "durable/best_peer": ("≤", 1),
        "recovery/best_peer": ("≤", 1),
        "bytes/best_lossless": ("≤", 1),
    },
    "objects": {
        "push/raw_put": ("≥", 0.9),
        "restore/raw_get": ("≥", 0.9),
        "push/best_peer": ("≥", 1),
        "restore/best_peer": ("≥", 1),
        "slowdown_while_pushing": ("≤", 1.05),
        "push_memory_mib": ("≤", 256),
        "restore_memory_mib": ("≤", 256),
        "requests_per_checkpoint/bound": ("≤", 1),
    },
    "hdfs": {
        "push/raw_put": ("≥", 0.9),
        "push/raw_put_3_replicas": ("≥", 0.9),
        "restore/raw_get": ("≥", 0.9),
        "restore/raw_get_3_replicas": ("≥", 0.9),
        "slowdown_while_pushing": ("≤", 1.02),
    },
}
"""Targets by workload and ratio."""


_NOT_MEASURED = "Not measured."
_CAUSES: Mapping[tuple[str, str], str] = {
    ("durable", "durable_new/limit"): "A raw write from torch's memory, which is in small pages, takes as long as "
    "asymcheck (`durable_new/limit_small_pages`).",
    ("durable", "durable_recycled/limit"): "A raw write from small pages takes 0.42 s instead of 0.31 s. asymcheck "
    "takes 0.48 s; 7 ms of them pass before the first write, and 15 ms after the last one "
    "([decision 29](../decisions/0029-shifted-payloads.md)). The other 44 ms are not measured.",
    ("restore", "restore/limit"): "In another run, reads of frames of 4 MiB into aligned memory took 0.48 s, one "
    "after the other, and 0.56 s on eight threads; 0.66 s if the threads also computed the digests, and 0.70 s if they "
    "also copied the bytes into tensors. The rest is not explained.",
    ("small", "durable/torch_save"): "A commit syncs more files than the one of `torch.save`.",
    ("stall", "slowdown_every_10"): "The two trainings with checkpoints differ by more: 0.96 and 1.10.",
    ("stall", "stall_p95/best_peer"): "About two thirds of the median stall are digests of a sixteenth of the state in "
    "`step()` and at the fence, which detect torn checkpoints. The longest stalls are not explained.",
    ("gpu", "capture/limit"): "The capture takes 5 ms longer than the copy alone. The first copy begins 2 ms after the "
    "call of `step()`; the cause of the other 3 ms is not known.",
    ("gpu", "slowdown_every_10"): "Not explained. In the same run, `asymmetric` has 1.003 "
    "([decision 32](../decisions/0032-immediate-schedule.md)).",
    (
        "publish",
        "full_bytes/release_bytes_1e-5",
    ): "49 % of the weights change between two releases. The entropy of "
    "their differences is 2.7 of 16 bits, so a code without context reaches at most 5.9. With the tensor and the "
    "exponent of the weight as context, it is 1.9 bits, which permits 8.5.",
    (
        "publish",
        "full_bytes/release_bytes_1e-6",
    ): "12 % of the weights change. The entropy of 0.82 bits permits 19.6, "
    "but the Huffman codes of Zstandard spend at least one bit for each byte. With the tensor and the "
    "exponent of the weight as context, it is 0.55 bits, which permits 29.",
    (
        "publish",
        "file_latency/publish_latency",
    ): "Differences, byte planes and Zstandard take 1.2 s of CPU time on two cores, and Zstandard alone 0.4 to 0.6 s. "
    'With `compression="auto"`, the releases were written plain, and the drive sets the limit '
    "(`file_latency/publish_latency_auto`).",
    ("merge", "merge/raw_io"): "The drive reads 3 GB/s. Two cores read and verify the three sources in 0.73 s, "
    "without the merge and the write, where a raw read takes 0.50 s.",
    ("models", "recovery/best_peer"): "The best library maps a file that is in the page cache. asymcheck first "
    "makes the captures durable that were only in memory. In the workload `restore`, this (`adopt`) takes 1.2 of "
    "1.8 s.",
    ("models", "stall_p95/best_peer_every_10"): "The worst is GPT-2 in mixed precision. Its weights in bfloat16 "
    "(249 MB) are in no optimizer, so `step()` read and copied them. `CaptureConfig(deferred=…)` now names such "
    "weights. In another run, on a slower machine, a checkpoint stalled the training for 38 to 68 ms with it, and for "
    "146 to 205 ms without. Of the other models, the worst has 0.109. The p95 of four checkpoints is their maximum.",
    ("models", "slowdown/best_peer_every_10"): "The worst is ResNet with torchsnapshot, whose two trainings have 0.94 "
    "and 1.04, while asymcheck has 1.02 in both. With each other model, the best library has 1.01 to 1.2 times the "
    "slowdown of asymcheck.",
    ("models", "bytes/best_lossless"): "Frames begin at multiples of 4 KiB, which costs 0.3 %.",
    ("objects", "push/raw_put"): "A push reads the store from the drive to which the server writes. In another "
    "run, the client's put took 4.1 s alone, and 5.1 s beside a thread that read and digested the same packs; the "
    "push took 4.9 s.",
    ("objects", "restore/raw_get"): "For each GB, asymcheck takes 0.8 to 1.1 s of processor time, and the client "
    "0.5 s, on the cores that the server needs, too. In another run, digests took 0.11 s and the copies into the "
    "tensors 0.17 s for each GB.",
    ("objects", "slowdown_while_pushing"): "The slowdowns of single checkpoints are 0.88 to 1.46. For 120 MB, the push "
    "takes 0.33 s of processor time, the client's put 0.27 s, and the server 1.1 s. The rest is not explained.",
    ("objects", "push_memory_mib"): "Encoded packs wait beside the packs that are sent. Without compression, a push of "
    "0.7 GB needed at most 225 MiB.",
    ("objects", "requests_per_checkpoint/bound"): "The bound permits objects of 64 MiB, and those of asymcheck have at "
    "most 48 MiB to save memory. Besides them, a checkpoint takes five listings, which show what other programs have "
    "sent or removed, a get and a put.",
    (
        "hdfs",
        "restore/raw_get_3_replicas",
    ): "In another run, on a busy machine, asymcheck took 1.9 s of processor time "
    "for each GB and the servers 0.7 s, on the same two cores. The client took 1.4 s when it read packet by packet, "
    "and 2.4 to 3 s when it read whole pieces, most of it in the kernel.",
    ("hdfs", "slowdown_while_pushing"): "The client's own put of as many bytes slows the training as much "
    "(`slowdown_beside_raw_put`).",
}
"""Measured causes of missed targets."""

_OF_PEERS = "÷ that of the best other library, worst of seven models"
_TITLES: Mapping[tuple[str, str], str] = {
    ("durable", "durable_new/limit"): "time of a raw write ÷ time of a durable save",
    ("durable", "durable_recycled/limit"): "time of a raw write ÷ time of a durable save, in reused files",
    ("durable", "durable_new/best_peer"): "durable save of the best other library ÷ of asymcheck",
    ("restore", "restore/limit"): "time of a raw read ÷ time of a restore",
    ("restore", "restore/best_peer"): "restore of the best other library ÷ of asymcheck",
    ("restore", "restore_fresh/best_peer"): "restore into new tensors of the best other library ÷ of asymcheck",
    ("small", "durable/torch_save"): "durable save of 5 MB ÷ `torch.save`",
    ("small", "recovery/torch_load"): "recovery of 5 MB ÷ `torch.load`",
    ("stall", "stall_p95/best_peer"): "stall by a checkpoint (p95) ÷ that of the best other library",
    ("stall", "slowdown_every_10"): "training with ÷ without a checkpoint every 10 steps",
    ("stall", "slowdown_every_10_of_1024_tokens"): "training with ÷ without a checkpoint every 10 longer steps",
    ("gpu", "slowdown_every_10"): "training with ÷ without a checkpoint every 10 steps, on a GPU",
    ("gpu", "capture/limit"): "time of a plain copy from a GPU ÷ time of a capture",
    ("gpu", "restore/limit"): "time of a raw read ÷ time of a restore onto a GPU",
    ("gpu", "restore/best_peer"): "restore onto a GPU of the best other library ÷ of asymcheck",
    ("models", "stall_p95/best_peer_every_10"): f"stall by a checkpoint (p95) {_OF_PEERS}",
    ("models", "slowdown_every_10"): "training with ÷ without a checkpoint every 10 steps, worst of seven models",
    ("models", "slowdown/best_peer_every_10"): f"slowdown of the training {_OF_PEERS}",
    ("models", "durable/best_peer"): f"time until a checkpoint is durable {_OF_PEERS}",
    ("models", "recovery/best_peer"): f"time of a recovery {_OF_PEERS}",
    ("models", "bytes/best_lossless"): f"bytes of a checkpoint {_OF_PEERS}",
}
"""Targets of the summary, in words."""


def write_pages(target: Path) -> None:
    """Write README.md, all.md and the summary's picture from the reports in the same folder."""
    names = [name for name in (*WORKLOADS, _ONE_MODEL) if (target / f"{name}.json").exists()]
    reports = {name: read_json(target / f"{name}.json") for name in names}
    captions = draw_summary(reports, target)
    manual = os.path.relpath(_MANUAL, target)
    (target / "README.md").write_text("\n".join(_summary(reports, captions, manual)) + "\n")
    (target / "all.md").write_text("\n".join(_everything(reports, manual)) + "\n")


def _summary(reports: Reports, captions: Sequence[str], manual: str) -> Iterator[str]:
    yield from ("# Results", "", "States have a realistic size, and all saves are durable: every file is synced.")
    yield f"[Benchmarks]({manual}) explains each workload, and [all figures](all.md) has the rest."
    if captions:
        yield from ("", "![Stall, time on the drive, and bytes of checkpoints](summary.png)", "", " ".join(captions))
    yield from _figures(reports)
    yield from _missed(reports)
    if "goodput" in reports:
        yield from _lost_hours(reports["goodput"])
    yield from ("", "## Machines", "", "| workload | measured | machine | software |", "|---|---|---|---|")
    for name, report in reports.items():
        facts = report.environment
        machine = facts.get("device") or f"{facts['processor'].partition(', load')[0]}, {facts['memory']}"
        software = f"asymcheck {facts['asymcheck']}, torch {facts['torch']}, Linux {facts['kernel'].partition('-')[0]}"
        yield f"| [{name}](all.md#{name}) | {facts['date'][:10]} | {machine}, {facts['file system']} | {software} |"


_LINES: Sequence[tuple[str, str, str, str, str | None]] = (
    ("a checkpoint stops the training", "stall", "visible stall, every 10", "asymcheck immediate", None),
    ("each of the first two", "stall", "visible stall of the first two, every 10", "asymcheck immediate", None),
    (
        "a checkpoint on a GPU, iterations of {iteration} ms",
        "gpu",
        "visible stall, every 10",
        "asymcheck immediate",
        None,
    ),
    ("with iterations of {iteration} ms", "gpu", "visible stall, every 10, one sequence", "asymcheck immediate", None),
    ("the first one on a GPU", "gpu", "visible stall of the first", "asymcheck immediate", None),
    ("durable save", "durable", "time to durable", "asymcheck new", "raw new"),
    ("restore into the model", "restore", "time to restore", "asymcheck load into", "raw read"),
    ("restore into new tensors", "restore", "time to restore", "asymcheck load", "raw read"),
    ("restore onto a GPU", "gpu", "time to restore onto the device", "asymcheck load", "raw read"),
    ("durable save of 5 MB", "small", "time to durable", "asymcheck save", None),
    ("5 MB durable after `step()`", "small", "time to durable", "asymcheck step and wait", None),
    ("recovery of 5 MB in a new process", "small", "recovery", "asymcheck", None),
)
"""Lines of the table: title, workload, metric, row of asymcheck, and row of the raw read or write."""


def _figures(reports: Reports) -> Iterator[str]:
    """Yield the table of asymcheck beside the best other library and a raw read or write."""
    yield from ("", "Median (minimum to maximum); less is better.", "")
    yield from ("| | unit | asymcheck | best other library | raw read or write |", "|---|---|---|---|---|")
    for title, workload, metric, ours, limit in _LINES:
        if workload not in reports:
            continue
        rows = {one.system: one for one in reports[workload].results if one.metric == metric}
        if ours not in rows:
            continue
        peers = [
            one for name, one in rows.items() if _is_peer(name) and name.endswith(" into") == ours.endswith(" into")
        ]
        best = min(peers, key=lambda one: one.median)
        yield (
            f"| {_titled(title, metric, reports[workload])} | {rows[ours].unit} | {_cell(rows[ours])} "
            f"| {best.system.removesuffix(' into')}: {_cell(best)} | {_cell(rows[limit]) if limit else ''} |"
        )
    yield ""
    for name, report in reports.items():
        skipped = report.environment.get("skipped", "nothing")
        if name in {line[1] for line in _LINES} and skipped != "nothing":
            yield f"Not part of {name}: {skipped}."


def _titled(title: str, metric: str, report: Report) -> str:
    """Return the title of a line, with the length of the iterations between which the training stops."""
    plain = metric.replace("visible stall, every 10", "iteration")
    medians = [row.median for row in report.results if (row.system, row.metric) == ("no checkpoints", plain)]
    return title.format(iteration=rounded(medians[0])) if medians else title


def _is_peer(system: str) -> bool:
    return not system.startswith(("asymcheck", "raw ", "bound", "no checkpoints"))


def _measured_aims(reports: Reports) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield workload, ratio, sign, target and measured value of each target."""
    for name, aims in _AIMS.items():
        for ratio, (sign, aim) in aims.items():
            if name in reports and ratio in reports[name].ratios:
                yield name, ratio, sign, aim, reports[name].ratios[ratio]


def _missed(reports: Reports) -> Iterator[str]:
    """Yield the missed targets of saves and restores in words, and the number of the other ones."""
    count = len(list(_measured_aims(reports)))
    missed = [one for one in _measured_aims(reports) if not _is_reached(*one[2:])]
    titled = [one for one in missed if one[:2] in _TITLES]
    others = list(dict.fromkeys(f"[{one[0]}](all.md#{one[0]})" for one in missed if one not in titled))
    yield from ("", "## Missed targets", "")
    yield f"{count - len(missed)} of {count} targets are reached."
    if others:
        rest = f"Missed, but not listed here: {len(missed) - len(titled)} of {', '.join(others)}"
        yield f"{rest}; [all figures](all.md#targets) has their causes."
    yield from ("", "| | target | measured | cause |", "|---|---|---|---|")
    for name, ratio, sign, aim, value in titled:
        cause = _CAUSES.get((name, ratio), _NOT_MEASURED)
        title = f"[{_TITLES[name, ratio]}](all.md#{name})"
        yield f"| {title} | {sign} {aim:g} | {_beside(aim, value)} | {cause} |"


def _lost_hours(report: Report) -> Iterator[str]:
    """Yield the table of lost GPU-hours."""
    rows = {(one.system, one.metric): one for one in report.results}
    metrics = list(dict.fromkeys(one.metric for one in report.results if one.unit == "GPU-hours"))
    yield from ("", "## GPU-hours lost in a month", "")
    yield "Simulated with the failures of the Llama 3 run, and with the costs of GPT-2 on two CPU cores for each GPU."
    yield "Each scheme has its best interval; `+S+O` are the default settings."
    yield "In parentheses: with all costs at their measured minimum, and at their maximum."
    yield from ("", f"| scheme | {' | '.join(one.removeprefix('lost in a month, ') for one in metrics)} |")
    yield "|---|" + "---|" * len(metrics)
    for scheme in dict.fromkeys(one.system for one in report.results):
        yield f"| {scheme} | {' | '.join(_hours(rows[scheme, metric]) for metric in metrics)} |"


def _hours(row: Row) -> str:
    return f"{row.median:,.0f} ({row.min:,.0f} to {row.max:,.0f})"


def _everything(reports: Reports, manual: str) -> Iterator[str]:
    yield from ("# All figures", "")
    yield f"Written by `make report`; [Benchmarks]({manual}) describes each workload and how to read its figures."
    yield "Compare ratios of one run, never absolute figures of two machines."
    yield from _targets(reports)
    for name, report in reports.items():
        yield from ("", f"## {name}", "")
        yield " · ".join(f"{key}: {value}" for key, value in report.environment.items() if key != "peers")
        yield ""
        if report.workload == "models":
            yield from _models(report)
        elif name == "goodput":
            yield from _goodput(report)
        yield from ("| ratio | |", "|---|---|")
        yield from (f"| `{key}` | {value:.3g} |" for key, value in report.ratios.items())
        yield from ("", f"![{name}]({name}.png) [all figures]({name}.json)")


def _targets(reports: Reports) -> Iterator[str]:
    """Yield the table of targets and measured values, missed targets first, with their causes."""
    yield from ("", "## Targets", "", "| | ratio | target | measured | cause |", "|---|---|---|---|---|")
    for name, ratio, sign, aim, value in sorted(_measured_aims(reports), key=lambda one: _is_reached(*one[2:])):
        mark, cause = "reached", ""
        if not _is_reached(sign, aim, value):
            mark, cause = "**missed**", _CAUSES.get((name, ratio), _NOT_MEASURED)
        yield f"| {mark} | `{ratio}` of [{name}](#{name}) | {sign} {aim:g} | {_beside(aim, value)} | {cause} |"


def _beside(aim: float, value: float) -> str:
    """Return a measured value with as many digits as show that it differs from the target."""
    return f"{value:.4g}" if f"{value:.3g}" == f"{aim:.3g}" else f"{value:.3g}"


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
    yield from _by_interval(rows, schemes, models[0])
    yield from _inexact(report, models)


def _by_interval(rows: Mapping[tuple[str, str], Row], schemes: Sequence[str], model: str) -> Iterator[str]:
    """Yield a table of the schemes that were measured at other intervals with ``model``."""
    begin = f"slowdown, {model}, every "
    found = [(scheme, int(metric.removeprefix(begin))) for scheme, metric in rows if metric.startswith(begin)]
    every = sorted({interval for _, interval in found})
    if len(every) == 1:
        return
    yield from (f"**At other intervals** with {model}: a checkpoint every {', '.join(map(str, every))} steps", "")
    measures = _MEASURES[:3]
    columns = [f"{metric} [{unit}], {interval}" for metric, unit, _ in measures for interval in every]
    yield f"| scheme | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(columns)
    for scheme in schemes:
        if any(name == scheme and interval != EVERY for name, interval in found):
            metrics = [f"{metric}, {model}, every {interval}" for metric, _, _ in measures for interval in every]
            yield f"| {scheme} | {' | '.join(_cell(rows.get((scheme, metric))) for metric in metrics)} |"
    yield ""


def _model(row: Row) -> str:
    return row.metric.split(", ")[1]


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return rounded(row.median) + (f" ({rounded(row.min)} to {rounded(row.max)})" if row.n > 1 else "")


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


def _goodput(report: Report) -> Iterator[str]:
    scenes = list(dict.fromkeys(row.metric for row in report.results if row.metric.startswith("goodput, ")))
    yield f"| scheme | {' | '.join(scene.removeprefix('goodput, ') for scene in scenes)} |"
    yield "|---|" + "---|" * len(scenes)
    rows = {(row.system, row.metric): row for row in report.results}
    for scheme in dict.fromkeys(row.system for row in report.results):
        cells = [rows.get((scheme, scene)) for scene in scenes]
        yield f"| {scheme} | {' | '.join(f'{row.median:.2f} %' if row else '-' for row in cells)} |"
    yield ""
