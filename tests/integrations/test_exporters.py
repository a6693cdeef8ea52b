"""Test exporters of metrics with the libraries that receive them."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from asymcheck import Checkpointer, Store
from asymcheck.capture.inflight import CheckpointReport
from asymcheck.config import CaptureConfig
from asymcheck.errors import InvalidInputError
from asymcheck.integrations import exporters
from tests.checkpointer.loops import folder_for_rings, linear_loop


def _train(folder: Path, export: exporters.OnCheckpoint) -> list[CheckpointReport]:
    """Save two steps, the second without a change of the model; return their reports."""
    reports: list[CheckpointReport] = []
    _, _, loop = linear_loop(128)
    capture = CaptureConfig(ring_folder=str(folder_for_rings(folder)))
    with (
        Store.open(folder / "store", create=True) as store,
        Checkpointer(
            store, loop.state, every=1, capture=capture, on_checkpoint=exporters.together(reports.append, export)
        ) as checkpointer,
    ):
        for step in range(2):
            loop.iterate(step)
            checkpointer.step(step)
            checkpointer.wait()
    return reports


@pytest.mark.parametrize(
    ("library", "export"), [("prometheus_client", exporters.prometheus), ("opentelemetry", exporters.spans().__enter__)]
)
def test_missing_library_is_named_with_its_extra(
    library: str, export: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test an environment without the library."""
    for name in list(sys.modules):
        if name.split(".")[0] == library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidInputError, match=rf"{library}; pip install 'asymcheck\[metrics\]'"):
        export()


def test_values_have_the_numbers_of_the_report() -> None:
    """Test a checkpoint of which a quarter was in the store, and a lost one."""
    report = CheckpointReport("run", 7, 400, 2, 0.5, 1.0, 2.0, 150, 300, 100, None)
    assert exporters.values(report) == {
        "checkpoint/step": 7.0,
        "checkpoint/stalled_s": 0.5,
        "checkpoint/durable_s": 2.0,
        "checkpoint/state_bytes": 400.0,
        "checkpoint/written_bytes": 150.0,
        "checkpoint/dedupe_ratio": 0.25,
        "checkpoint/lost": 0.0,
    }
    lost = CheckpointReport("run", 7, 400, 2, 0.5, None, 2.0, 0, 0, 0, OSError())
    assert exporters.values(lost, "")["lost"] == 1.0
    assert exporters.values(lost, "")["dedupe_ratio"] == 0.0


def test_an_exporter_that_fails_hides_no_report_from_others() -> None:
    """Test a server that does not respond, between two other exporters."""
    report = CheckpointReport("run", 7, 400, 2, 0.5, 1.0, 2.0, 150, 300, 100, None)
    first: list[CheckpointReport] = []
    last: list[CheckpointReport] = []

    def refuse(_report: CheckpointReport) -> None:
        assert (first, last) == ([report], [])
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        exporters.together(first.append, refuse, last.append)(report)
    assert last == [report]


@pytest.mark.slow
def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    """Test the event file with the reader of TensorBoard."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "log")) as writer:
        reports = _train(tmp_path, exporters.tensorboard(writer))
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert len(events.Tags()["scalars"]) == 6
    written = [(item.step, item.value) for item in events.Scalars("checkpoint/written_bytes")]
    assert written == [(report.step, report.written_bytes) for report in reports]


@pytest.mark.slow
def test_prometheus_serves_and_writes_the_metrics(tmp_path: Path) -> None:
    """Test the HTTP server and the textfile, after two durable checkpoints."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    reports = _train(tmp_path, exporters.prometheus(registry, tmp_path / "asymcheck.prom"))
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as reply:
            text = reply.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    lines = set(text.splitlines())
    assert 'asymcheck_checkpoints_total{outcome="durable",run="default"} 2.0' in lines
    assert 'asymcheck_durable_step{run="default"} 1.0' in lines
    assert f'asymcheck_checkpoint_stalled_seconds{{run="default"}} {reports[-1].stalled_s}' in lines
    assert (tmp_path / "asymcheck.prom").read_text() == text


def test_a_textfile_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Test that a failure is logged, and that the file has the metrics once it can be written."""
    pytest.importorskip("prometheus_client")
    folder = tmp_path / "collector"
    export = exporters.prometheus(textfile=folder / "asymcheck.prom")
    report = CheckpointReport("run", 7, 400, 2, 0.5, 1.0, 2.0, 150, 300, 100, None)
    export(report)
    assert "cannot write the metrics of run run: " in caplog.text
    folder.mkdir()
    export(report)
    assert 'asymcheck_durable_step{run="run"} 7.0' in (folder / "asymcheck.prom").read_text()


@pytest.mark.slow
def test_prometheus_textfile_has_no_metrics_of_the_process(tmp_path: Path) -> None:
    """Test that names of the node exporter, such as process_cpu_seconds_total, are not written again."""
    pytest.importorskip("prometheus_client")
    _train(tmp_path, exporters.prometheus(textfile=tmp_path / "asymcheck.prom"))
    lines = (tmp_path / "asymcheck.prom").read_text().splitlines()
    assert {line.split("_")[0] for line in lines if not line.startswith("#")} == {"asymcheck"}


@pytest.mark.slow
def test_spans_have_the_times_of_the_work(tmp_path: Path) -> None:
    """Test that checkpoints and commits are spans of the same trace provider, in order."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with exporters.spans(provider.get_tracer("test")):
        reports = _train(tmp_path, lambda _report: None)
    found = {name: [] for name in ("asymcheck.checkpoint", "asymcheck.commit")}
    for span in memory.get_finished_spans():
        found.get(span.name, []).append(span)
        assert span.name.removeprefix("asymcheck.") in exporters.SPANS
    for report, checkpoint, commit in zip(reports, *found.values(), strict=True):
        assert checkpoint.attributes["asymcheck.step"] == commit.attributes["asymcheck.step"] == report.step
        assert (checkpoint.end_time - checkpoint.start_time) / 1e9 == pytest.approx(report.durable_s, abs=0.01)
        assert checkpoint.start_time < commit.start_time < commit.end_time
