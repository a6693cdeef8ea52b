"""Exporters: checkpoints as metrics of TensorBoard and Prometheus, and work of the store as OpenTelemetry spans.

:func:`values` turns the report of a checkpoint into named numbers, so that any other library needs one line::

    asymcheck.Checkpointer(..., on_checkpoint=lambda report: wandb.log(values(report)))
    asymcheck.Checkpointer(..., on_checkpoint=lambda report: mlflow.log_metrics(values(report), step=report.step))
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from asymcheck.capture.inflight import CheckpointReport
from asymcheck.errors import InvalidInputError
from asymcheck.events import Interval, watch

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry
    from torch.utils.tensorboard import SummaryWriter

_logger = logging.getLogger(__name__)

OnCheckpoint = Callable[[CheckpointReport], None]
SPANS = ("step", "fence", "wait", "checkpoint", "commit", "save", "restore", "push", "pull", "adopt")
"""Intervals of :data:`asymcheck.events.INTERVALS` that become spans by default."""

_MEANINGS = {
    "stalled_s": "Seconds that the training waited in step() and at the fence",
    "durable_s": "Seconds from step() until the checkpoint was durable or lost",
    "state_bytes": "Bytes of all tensors",
    "written_bytes": "Encoded bytes written to the store",
    "dedupe_ratio": "Share of the bytes that the store already had, from 0 to 1",
}


def values(report: CheckpointReport, prefix: str = "checkpoint/") -> dict[str, float]:
    """Return stall, durable time, bytes and dedupe ratio of a checkpoint, and whether it is lost, by name.

    Args:
        report: a report that ``Checkpointer(on_checkpoint=…)`` gets.
        prefix: first part of each name.
    """
    plain_bytes = report.new_bytes + report.known_bytes
    named = {
        "step": report.step,
        "stalled_s": report.stalled_s,
        "durable_s": report.durable_s,
        "state_bytes": report.state_bytes,
        "written_bytes": report.written_bytes,
        "dedupe_ratio": report.known_bytes / plain_bytes if plain_bytes else 0.0,
        "lost": report.error is not None,
    }
    return {f"{prefix}{name}": float(value) for name, value in named.items()}


def together(*exporters: OnCheckpoint) -> OnCheckpoint:
    """Return a callback that passes each report to all exporters."""

    def export(report: CheckpointReport) -> None:
        # Each exporter gets the report, even if another one raises.
        with contextlib.ExitStack() as calls:
            for exporter in reversed(exporters):
                calls.callback(exporter, report)

    return export


def tensorboard(writer: SummaryWriter) -> OnCheckpoint:
    """Return a callback that adds scalars of each checkpoint to ``writer``, at the step of the checkpoint."""

    def export(report: CheckpointReport) -> None:
        for name, value in values(report).items():
            if not name.endswith("/step"):
                writer.add_scalar(name, value, report.step)

    return export


def prometheus(
    registry: CollectorRegistry | None = None, textfile: str | os.PathLike[str] | None = None
) -> OnCheckpoint:
    """Return a callback that sets gauges and counters, with the run as a label.

    Args:
        registry: registry of the metrics. None selects the default one, which
            ``prometheus_client.start_http_server(port)`` serves, or a new one with ``textfile``: the process metrics of
            the default registry would collide with those of the node exporter. One registry takes one exporter.
        textfile: file for the textfile collector of the node exporter, replaced after each checkpoint. If it cannot be
            written, a warning is logged, and the training continues.

    Raises:
        InvalidInputError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, write_to_textfile
    except ImportError as error:
        raise InvalidInputError("metrics need prometheus_client; pip install 'asymcheck[metrics]'") from error
    known = registry or (REGISTRY if textfile is None else CollectorRegistry())
    gauges = {
        name: Gauge(f"asymcheck_checkpoint_{re.sub('_s$', '_seconds', name)}", text, ["run"], registry=known)
        for name, text in _MEANINGS.items()
    }
    step = Gauge("asymcheck_durable_step", "Newest durable step", ["run"], registry=known)
    ended = Gauge(
        "asymcheck_durable_timestamp_seconds", "Time of the newest durable checkpoint", ["run"], registry=known
    )
    total = Counter("asymcheck_checkpoints", "Checkpoints that are durable or lost", ["run", "outcome"], registry=known)
    written = Counter("asymcheck_written_bytes", "Encoded bytes written to the store", ["run"], registry=known)

    def export(report: CheckpointReport) -> None:
        for name, value in values(report, "").items():
            if name in gauges:
                gauges[name].labels(report.run).set(value)
        total.labels(report.run, "durable" if report.error is None else "lost").inc()
        written.labels(report.run).inc(report.written_bytes)
        if report.error is None:
            step.labels(report.run).set(report.step)
            ended.labels(report.run).set_to_current_time()
        if textfile is not None:
            try:
                write_to_textfile(os.fspath(textfile), known)
            except OSError as error:
                # The next checkpoint tries again. Metrics on a full drive are no reason to end the training.
                _logger.warning("cannot write the metrics of run %s: %s", report.run, error)

    return export


@contextlib.contextmanager
def spans(tracer: Tracer | None = None, names: Collection[str] = SPANS) -> Iterator[None]:
    """Export work of this process as OpenTelemetry spans inside the ``with`` block.

    Args:
        tracer: tracer of the spans; None for the one of the global provider.
        names: intervals of :data:`asymcheck.events.INTERVALS` to export; each partition has a ``copy`` and a ``write``.

    Raises:
        InvalidInputError: opentelemetry is not installed.
    """
    try:
        from opentelemetry.trace import StatusCode, get_tracer
    except ImportError as error:
        raise InvalidInputError("spans need opentelemetry; pip install 'asymcheck[metrics]'") from error
    chosen = get_tracer("asymcheck") if tracer is None else tracer

    def export(interval: Interval) -> None:
        if interval.name not in names:
            return
        # Intervals have times of perf_counter(), and spans have times of the clock.
        start_ns = time.time_ns() - int((time.perf_counter() - interval.start_s) * 1e9)
        attributes = {f"asymcheck.{name}": value for name, value in interval.detail.items()}
        attributes |= {"asymcheck.bytes": interval.bytes} if interval.bytes else {}
        span = chosen.start_span(f"asymcheck.{interval.name}", start_time=start_ns, attributes=attributes)
        if "failed" in interval.detail:
            span.set_status(StatusCode.ERROR, str(interval.detail["failed"]))
        span.end(start_ns + int(interval.seconds * 1e9))

    with watch(export):
        yield
