"""Test the documents, the server and the static file of the page, without a browser."""

from __future__ import annotations

import html.parser
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import asymcheck
from asymcheck.cli import exit_status
from asymcheck.commit.save_request import new_save_id
from asymcheck.errors import FormatError, OutOfSpaceError, StorageError
from asymcheck.storage.local_files import Files
from asymcheck.types import Part
from asymcheck.view.documents import Documents
from asymcheck.view.server import PageServer
from asymcheck.view.trace_summary import TraceFile
from tests.cli.conftest import run_command
from tests.damage.flips import flip
from tests.view.conftest import HOSTILE, Serve, fetch

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def check_schema(name: str, document: object) -> None:
    """Check a document against the schema of a command."""
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))).validate(document)


def files_of(store: Path) -> dict[str, bytes]:
    """Return the content of all files of a store."""
    return {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def ask(
    server: PageServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    """Send a request, and return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{server.server_port}" if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def error_of(server: PageServer, path: str) -> str:
    """Return the message of a request that fails."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(server, path)
    with caught.value as answer:
        return str(json.load(answer)["error"])


def test_server_checks_token_host_and_method(serve: Serve, store: Path) -> None:
    """Test that only the printed URL is answered, only for the own host, and only for reading."""
    with serve(store) as server:
        page = f"/{server.token}/"
        assert server.server_address[0] == "127.0.0.1"
        status, headers, body = ask(server, page)
        assert status == 200
        assert "<main" in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["Referrer-Policy"] == "no-referrer"
        assert ask(server, f"{page}page.js")[0] == ask(server, f"{page}page.css")[0] == 200
        assert ask(server, page, host=f"localhost:{server.server_port}")[0] == 200
        assert ask(server, page, host="evil.example")[0] == ask(server, page, host="")[0] == 421
        for path in ("/", "/api/state", f"/{server.token[:-1]}/", "/%00/"):
            assert ask(server, path)[0] == 403, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, f"{page}api/verify", method=method)[0] == 501
        for name in ("nothing", "../documents.py", "page.html", "/etc/passwd", ""):
            assert ask(server, f"{page}api/{name}")[0] == 404, name
        assert ask(server, page, method="HEAD")[2] == ""


def test_documents_follow_the_schemas_of_the_commands(serve: Serve, store: Path, tmp_path: Path) -> None:
    """Test that the page shows the documents that the command line prints."""
    remote = f"file://{tmp_path}/remote"
    with asymcheck.Store.open(store) as opened:
        opened.push(remote)
    with serve(store, remote=remote) as server:
        state = fetch(server, "state")
        assert [(run["run"], run["checkpoints"], run["newest_step"]) for run in state["runs"]] == [
            ("default", 4, 25),
            ("other", 1, 1),
        ]
        for name, query, command in (
            ("log", "run=default", ("log", "--all", store)),
            ("remote", "run=default", ("log", "--all", remote)),
            ("du", "", ("du", store)),
            ("diff", "run=default&a=10&b=25", ("diff", store, 10, 25)),
            ("memory", "", ("inspect", "--tier", "memory", "--ring-folder", tmp_path, store)),
        ):
            found = fetch(server, f"{name}?{query}")
            check_schema(command[0], found)
            assert found == run_command(*command, "--json").json
        verified = fetch(server, "verify")
        check_schema("verify", verified["document"])
        assert fetch(server, "state")["verified"] == verified


def test_new_bytes_add_up_to_the_stored_bytes(store: Path) -> None:
    """Test that each stored byte is new in exactly one checkpoint: the earliest that needs it."""
    with asymcheck.Store.open(store, read_only=True) as opened:
        used = opened.disk_usage()
    by_step = {(item.run, item.step): item for item in used.checkpoints}
    assert sum(item.new_bytes for item in used.checkpoints) == used.live_bytes
    assert by_step["default", 10].new_bytes == by_step["default", 10].stored_bytes
    assert 0 < by_step["default", 20].new_bytes < by_step["default", 20].stored_bytes


def test_page_follows_a_store(serve: Serve, store: Path) -> None:
    """Test that a save and a new generation change the version, and that manifests are read once."""
    with serve(store) as server, asymcheck.Store.open(store) as opened:
        server.documents._histories._interval_s = 0.0
        first = fetch(server, "log?run=default")
        before = fetch(server, "state")["runs"][0]
        assert before["read"] == 4
        assert fetch(server, "state")["runs"][0]["version"] == before["version"]
        generation = opened.training.begin_generation(opened.checkpoints()[0])
        opened.save({"x": torch.ones(5)}, step=40, generation=generation)
        after = fetch(server, "state")["runs"][0]
        assert after["version"] != before["version"]
        second = fetch(server, "log?run=default")
        assert second == run_command("log", "--all", store, "--json").json
        abandoned = [
            sum(e["checkpoint"]["on_line"] is False for e in log["history"]["entries"]) for log in (first, second)
        ]
        assert abandoned == [1, 3]
        (manifest,) = min((store / "manifests" / "default").iterdir()).iterdir()
        manifest.write_bytes(b"x")  # If the server read the manifest again, step 10 would be damaged.
        opened.delete(40)
        entries = fetch(server, "log?run=default")["history"]["entries"]
        assert [entry["checkpoint"]["complete"] for entry in entries] == [True] * 4


def test_page_follows_a_store_during_a_verification(serve: Serve, store: Path) -> None:
    """Test the documents that the page reads for each new checkpoint."""
    with serve(store) as server, server.documents._heavy:
        for name in ("state", "log?run=default", "memory", "du"):
            with urllib.request.urlopen(f"{server.url}api/{name}", timeout=9) as answer:  # noqa: S310 - http
                assert answer.status == 200


def test_first_checkpoint_of_a_run_is_completed_later(serve: Serve, store_path: Path) -> None:
    """Test a run whose only checkpoint was shown before the last rank had saved its part."""
    save_id = new_save_id().hex()
    with asymcheck.Store.open(store_path, create=True) as opened, serve(store_path) as server:
        server.documents._histories._interval_s = 0.0
        for rank, is_complete in enumerate((False, True)):
            opened.save({"x": torch.ones(5)}, step=1, part=Part(rank, 2, save_id))
            (entry,) = fetch(server, "log?run=default")["history"]["entries"]
            assert entry["checkpoint"]["complete"] is is_complete


def test_query_cannot_add_options_or_change_the_store(serve: Serve, store: Path, tmp_path: Path) -> None:
    """Test that values of a query are never options, and that no request writes."""
    with serve(store) as server:
        fetch(server, "du")
        before = files_of(store)
        quote = urllib.parse.quote
        assert "choose two steps" in error_of(server, "diff?a=--no-norms&b=10")
        assert "choose two steps" in error_of(server, f"diff?a=10&b={quote('other@1')}")
        assert "invalid run name" in error_of(server, f"diff?a=10&b=20&run={quote('--remote=file:///x')}")
        assert "--repair" in error_of(server, f"diff?a=10&b=20&tensors={quote('--repair')}")
        assert "has no run" in error_of(server, f"log?run={quote('../default')}")
        assert "--remote" in error_of(server, "remote?run=default")
        assert "--trace" in error_of(server, "trace?from=0")
        assert fetch(server, "verify?repair=1&remote=file:///x")["document"]["repaired"] is None
        assert fetch(server, f"du?run={quote(str(tmp_path))}") == run_command("du", store, "--json").json
        assert files_of(store) == before


def test_empty_and_damaged_stores_are_shown(serve: Serve, store: Path, tmp_path: Path) -> None:
    """Test a store without checkpoints, an unreadable manifest and a lost pack."""
    asymcheck.Store.open(tmp_path / "empty", create=True).close()
    with serve(tmp_path / "empty") as server:
        assert fetch(server, "state")["runs"] == []
        assert fetch(server, "du")["accounting"]["checkpoints"] == []
        assert fetch(server, "verify")["document"]["findings"] == []
    (manifest,) = min((store / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")
    max((store / "packs").iterdir(), key=lambda path: path.stat().st_size).unlink()
    with serve(store) as server:
        entries = fetch(server, "log?run=default")["history"]["entries"]
        assert [entry["checkpoint"]["complete"] for entry in entries] == [True, True, True, False]
        assert "digest" in entries[-1]["problem"]
        assert fetch(server, "verify")["document"]["lost"]
        assert "does not have the digest" in error_of(server, "diff?a=10&b=20")


class _Tags(html.parser.HTMLParser):
    """Collects tags with their attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def test_export_is_one_file_without_injected_elements(store: Path, tmp_path: Path) -> None:
    """Test that the file needs no other file, and that hostile names stay inside the data."""
    plain, target = tmp_path / "plain.html", tmp_path / "report.html"
    asymcheck.Store.open(tmp_path / "empty", create=True).close()
    assert run_command("view", tmp_path / "empty", "--export", plain).status == exit_status.OK
    words = ("view", store, "--ring-folder", tmp_path, "--export", target, "--verify", "--compare", "10", "20")
    assert run_command(*words).status == exit_status.OK
    page, reference = _Tags(target.read_text("utf-8")), _Tags(plain.read_text("utf-8"))
    assert page.tags == reference.tags
    assert not any(set(attributes) & {"src", "onerror", "onclick"} for _, attributes in page.tags)
    assert {a.get("href") for tag, a in page.tags if tag in {"link", "a"}} == {"data:,", "#main"}
    data = json.loads(page.scripts[0])
    assert HOSTILE in data["log"]["default"]["history"]["entries"][-1]["checkpoint"]["metrics"]
    assert f"model.{HOSTILE}" in [tensor["name"] for tensor in data["diff"]["difference"]["tensors"]]
    assert data["state"]["verified"]["document"]["findings"] == []
    for name in ("log", "du"):
        found = data[name]["other"] if name == "log" else data[name]
        check_schema(name, found)


def test_verification_of_a_location_reads_every_byte(store: Path, serve: Serve, tmp_path: Path) -> None:
    """Test a flipped bit in a frame at a remote location."""
    with asymcheck.Store.open(store) as opened:
        opened.push(f"file://{tmp_path}/remote")
    (pack,) = (tmp_path / "remote" / "packs").iterdir()
    flip(pack, 8 * (pack.stat().st_size // 2))
    with serve(f"file://{tmp_path}/remote") as server:
        document = fetch(server, "verify")["document"]
    assert document["deep"]
    assert [finding["kind"] for finding in document["findings"]] == ["damaged-frame"]


def test_export_without_its_verification_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a verification that ends early: a report without findings would look intact."""
    monkeypatch.setattr(Documents, "_verify", _refuse)
    outcome = run_command("view", store, "--export", tmp_path / "report.html", "--verify")
    assert (outcome.status, (tmp_path / "report.html").exists()) == (exit_status.STORAGE, False)


def test_export_of_a_comparison_with_a_missing_checkpoint_is_refused(store: Path, tmp_path: Path) -> None:
    """Test that the command names the missing step, and writes no file."""
    outcome = run_command("view", store, "--export", tmp_path / "report.html", "--compare", "10", "999")
    assert (outcome.status, "no checkpoint of step 999" in outcome.err) == (exit_status.NOT_FOUND, True)
    assert not (tmp_path / "report.html").exists()


def test_export_replaces_a_file_only_if_asked(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that an existing file is refused, and that a failed export leaves it whole."""
    target = tmp_path / "report.html"
    target.write_text("precious")
    outcome = run_command("view", store, "--export", target)
    assert (outcome.status, "pass --overwrite" in outcome.err) == (exit_status.USAGE, True)
    with monkeypatch.context() as full:
        full.setattr(Files, "pwrite", _refuse)
        assert run_command("view", store, "--export", target, "--overwrite").status == exit_status.STORAGE
    assert (target.read_text(), sorted(path.name for path in tmp_path.glob("*report*"))) == ("precious", [target.name])
    assert run_command("view", store, "--export", target, "--overwrite").status == exit_status.OK
    assert "<html" in target.read_text("utf-8")


def _refuse(*_arguments: object) -> None:
    raise OutOfSpaceError("the drive is full")


def test_page_code_never_parses_text_as_html() -> None:
    """Test that the script has no function that turns text of a store into elements or code."""
    script = (Path(asymcheck.__file__).parent / "view" / "page.js").read_text("utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert word not in script


def test_view_refuses_useless_options(store: Path, tmp_path: Path) -> None:
    """Test the messages and statuses of wrong calls."""
    for words in (("--verify",), ("--compare", 10, 20), ("--export", tmp_path / "r.html", "--open")):
        assert run_command("view", store, *words).status == exit_status.USAGE
    assert run_command("view", tmp_path / "nothing").status == exit_status.NOT_FOUND
    outcome = run_command("view", store, "--export", tmp_path / "no" / "folder.html")
    assert outcome.status == exit_status.USAGE
    assert "create it first" in outcome.err
    assert run_command("view", store, "--overwrite").status == exit_status.USAGE
    assert run_command("view", store, "--export", tmp_path, "--overwrite").status == exit_status.USAGE


@pytest.mark.slow
def test_view_prints_a_url_and_ends_at_an_interrupt(store: Path) -> None:
    """Test the command in a process of its own."""
    command = [sys.executable, "-m", "asymcheck", "view", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - http
            assert b"asymcheck" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == exit_status.OK


def test_view_outlives_a_browser_that_closes_its_connection(store: Path) -> None:
    """Test that a write to a closed connection does not end the process, as SIGPIPE would."""
    command = [sys.executable, "-m", "asymcheck", "view", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        parts = urllib.parse.urlsplit(url)
        for _ in range(5):
            with socket.create_connection((parts.hostname, parts.port)) as connection:
                connection.sendall(f"GET {parts.path}api/state HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
            time.sleep(0.05)
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - http
            assert answer.status == 200
        process.terminate()


def record(**fields: Any) -> str:  # noqa: ANN401 - JSON
    """Return a line of a trace."""
    return json.dumps({"pid": 1, "tid": 1, "ph": "X", **fields})


def test_trace_summary_merges_close_intervals_and_sums_stalls(tmp_path: Path) -> None:
    """Test a trace that is still written, its next lines, and a new trace in the same file."""
    path = tmp_path / "trace.json"
    lines = [
        record(cat="step", name="step", ts=1000.0 * number, dur=100.0, args={"step": number}) for number in range(1, 5)
    ]
    lines += [record(cat="fence", name="fence", ts=4200.0, dur=50.0, args={"step": 4})]
    lines += [record(cat="copy", name="copy", ts=4100.0 + 0.01 * number, dur=0.005, args={}) for number in range(100)]
    path.write_text("[\n" + ",\n".join([*lines, '{"ph": "X", "cat": "st']), "utf-8")
    trace = TraceFile(path)
    summary = trace.summary()
    assert [(stall.step, round(stall.stall_ms, 6)) for stall in summary.stalls] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.1),
        (4, 0.15),
    ]
    assert summary.end_ms == pytest.approx(3.25)
    (copies,) = summary.lanes["capture"]
    assert copies.count == 100
    assert copies.busy_ms == pytest.approx(0.0005)
    assert len(trace.summary(3.0999, 3.1001).lanes["capture"]) == 10
    path.write_text(
        "[\n" + ",\n".join([*lines, record(cat="save", name="save", ts=9e3, dur=1e3, args={"step": 9})]) + "\n]\n",
        "utf-8",
    )
    assert trace.summary().stalls[-1].step == 9
    path.write_text("[\n" + lines[0] + "\n]\n", "utf-8")
    assert len(trace.summary().stalls) == 1
    path.write_text("no trace\n", "utf-8")
    other = TraceFile(path)
    for _ in range(2):
        with pytest.raises(FormatError, match="pass a file of"):
            other.summary()
    with pytest.raises(StorageError, match="check the path"):
        TraceFile(tmp_path / "nothing").summary()
