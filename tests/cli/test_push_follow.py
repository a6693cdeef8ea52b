"""Test ``asymcheck push --follow`` in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from asymcheck import Store
from asymcheck.cli.main import commands
from tests.remote.conftest import CONFIG, check_location, save_steps, state_of
from tests.zygote import REPOSITORY, wait_until


def _follow(store: Path, *options: str) -> subprocess.Popen[str]:
    arguments = ["push", str(store), f"file://{store.parent}/remote", "--follow", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "asymcheck", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_pushes_new_checkpoints_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Test checkpoints of before and after the start, the lines of the uploads, and the final report."""
    save_steps(tmp_path / "store", 2, 3)
    with _follow(tmp_path / "store", "--every", "2", "--json") as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        save_steps(tmp_path / "store", 4)
        lines.append(process.stderr.readline())
        # The process has written the line, but may not have returned from the call that did so.
        time.sleep(0.2)
        process.send_signal(number)
        output, rest = process.communicate(timeout=30)
    assert [line.split(":")[1] for line in lines] == [" sent step 2", " sent step 4"]
    assert all("0 checkpoints waiting" in line and "/s; " in line for line in lines)
    report = json.loads(output)
    assert (process.returncode, [name.split(" (")[0] for name in report["committed"]], rest) == (
        0,
        ["run default, step 2", "run default, step 4"],
        "",
    )
    jsonschema.validate(report, json.loads((REPOSITORY / "docs/schemas/push.json").read_text("utf-8")))
    check_location(f"file://{tmp_path}/remote", 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_waits_for_the_store(tmp_path: Path, number: signal.Signals) -> None:
    """Test a push that begins before its training."""
    with _follow(tmp_path / "store") as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith("Check the path. Waiting until a training creates the store\n")
        save_steps(tmp_path / "store", 2)
        assert process.stderr.readline().startswith("asymcheck: sent step 2: ")
        time.sleep(0.2)
        process.send_signal(number)
        output, rest = process.communicate(timeout=30)
    assert (process.returncode, output.split(",")[0], rest) == (0, "1 checkpoint sent", "")
    check_location(f"file://{tmp_path}/remote", 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait_for_the_store(tmp_path: Path, number: signal.Signals) -> None:
    """Test a push whose training never begins."""
    with _follow(tmp_path / "store") as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(number)
        output, rest = process.communicate(timeout=30)
    assert (process.returncode, output, rest) == (0, "0 checkpoints sent, 0 B in 0 packs\n", "")


@pytest.mark.slow
def test_second_signal_cancels_the_upload(tmp_path: Path) -> None:
    """Test a slow link: the first signal waits for the upload, the second one does not."""
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as opened:
        opened.save(state_of(1), step=1)
    with _follow(tmp_path / "store", "--limit-rate", "10KB") as process:
        remote = tmp_path / "remote/packs"
        wait_until(lambda: remote.exists() and bool(list(remote.iterdir())), "the upload to begin")
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, notes = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "0 checkpoints sent, 0 B in 0 packs\n")
    assert notes.startswith("asymcheck: ending after the upload of step 1; a second signal cancels the upload\n")
    assert "trying again" not in notes
    assert not list((tmp_path / "remote").rglob("*.manifest"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--follow", "--all"], "leave out --all"),
        (["--every", "2"], "--every applies to --follow only"),
        (["--follow", "--create"], "without --follow only"),
    ],
)
def test_contradicting_options_of_a_push_are_refused(store_path: Path, options: list[str], message: str) -> None:
    """Test the status of a wrong command line."""
    result = CliRunner().invoke(commands, ["push", str(store_path), "file:///nowhere", *options])
    assert result.exit_code == 2
    assert message in result.output
