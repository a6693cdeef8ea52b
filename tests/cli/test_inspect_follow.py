"""Test the live view beside a running training."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck.cli import exit_status, follow
from asymcheck.errors import RemoteUnreachableError
from asymcheck.format.manifest import Manifest
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader
from asymcheck.storage.remote import RemoteTier
from tests.cli.conftest import run_command
from tests.crash.states import Journal
from tests.zygote import Zygote, wait_until


@pytest.mark.slow
def test_follow_shows_a_running_training_until_it_is_interrupted(zygote: Zygote, tmp_path: Path) -> None:
    """Test growing steps, copies in memory and at the location, and the status of Ctrl-C."""
    options = json.dumps({"every": 5, "push": 1})
    words = ["train", tmp_path, options]
    child = zygote.start_program("tests.crash.preempted", words, dict(os.environ), tmp_path / "output.txt")
    wait_until((tmp_path / "remote" / "asymcheck.store").exists, "the first push")
    command = [sys.executable, "-m", "asymcheck", "inspect", str(tmp_path / "store"), "--follow", "--json"]
    command += ["--remote", f"file://{tmp_path}/remote", "--ring-folder", str(tmp_path / "memory")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0
    views = [line["runs"][0] for line in lines]
    assert all(view["run"] == "default" and view["is_running"] for view in views)
    assert views[-1]["step"] > views[0]["step"]
    assert views[-1]["memory_step"] is not None, views
    assert views[-1]["remote_step"] is not None, views
    assert all(view["age_s"] < 60 and view["state_bytes"] > 0 for view in views)
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == 143, child.output.read_text()
    assert len(Journal(tmp_path / "journal").lines("step")) > views[-1]["step"]


def test_follow_refuses_options_for_one_checkpoint(tmp_path: Path) -> None:
    """Test options that --follow cannot be combined with."""
    from click.testing import CliRunner

    from asymcheck.cli.main import commands

    done = CliRunner().invoke(commands, ["inspect", str(tmp_path), "--follow", "--values"])
    assert done.exit_code == 2
    assert "--follow shows runs: leave out" in done.output


def _looks(monkeypatch: pytest.MonkeyPatch, count: int, *words: object) -> list[dict[str, Any]]:
    """Return the first lines of ``asymcheck inspect --follow``, without pauses."""
    sleeps = itertools.count(1)

    def sleep(_seconds: float) -> None:
        if next(sleeps) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=sleep, time_ns=time.time_ns, strftime=time.strftime))
    done = run_command("inspect", *words, "--follow", "--json")
    assert (done.status, done.err) == (0, "")
    return [json.loads(line) for line in done.out.splitlines()]


def test_follow_continues_when_a_remote_store_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test one look at a location that does not answer."""
    location = (tmp_path / "far").as_uri()
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        store.save({"x": torch.ones(5000)}, step=7)
        store.push(location)
    whole, calls = RemoteTier.usage, itertools.count()

    def usage(self: RemoteTier) -> tuple[int, int, int, int]:
        if next(calls) == 1:
            raise RemoteUnreachableError("it does not answer")
        return whole(self)

    monkeypatch.setattr(RemoteTier, "usage", usage)
    lines = _looks(monkeypatch, 3, location)
    assert [line["problem"] for line in lines] == ["it does not answer", None, None]
    assert len({line["pack_bytes"] for line in lines}) == 1


def test_follow_shows_the_store_while_the_location_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test looks before and after the first push."""
    location = (tmp_path / "far").as_uri()
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        store.save({"x": torch.ones(5000)}, step=7)
        words = (tmp_path / "store", "--remote", location)
        (line,) = _looks(monkeypatch, 1, *words)
        assert "does not exist" in line["problem"]
        assert [(view["step"], view["remote_step"], view["waiting"]) for view in line["runs"]] == [(7, None, None)]
        store.push(location)
        (line,) = _looks(monkeypatch, 1, *words)
    assert line["problem"] is None
    assert [(view["step"], view["remote_step"], view["waiting"]) for view in line["runs"]] == [(7, 7, 0)]


def test_follow_reads_only_the_manifest_of_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that a look at a long run costs as little as at a short one, also at the location."""
    location = (tmp_path / "far").as_uri()
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        for step in range(6):
            store.save({"x": torch.full((5000,), float(step))}, step=step)
        store.push(location, everything=True)
        store.save({"x": torch.ones(5000)}, step=6)
    (manifest,) = max((tmp_path / "store" / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")
    whole, read = ManifestReader.read_all, list[int]()

    def read_all(self: ManifestReader, listing: CheckpointFiles) -> list[Manifest]:
        read.append(listing.ref.step)
        return whole(self, listing)

    monkeypatch.setattr(ManifestReader, "read_all", read_all)
    lines = _looks(monkeypatch, 3, tmp_path / "store", "--remote", location)
    (view,) = lines[-1]["runs"]
    assert (view["step"], view["remote_step"], view["waiting"], view["state_bytes"]) == (5, 5, 0, 20000)
    # The newest one is damaged, and could be repaired.
    assert read == [6, 5, 6, 6]


def test_follow_keeps_nothing_of_earlier_checkpoints(tmp_path: Path) -> None:
    """Test that a view of a training of weeks does not grow."""
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        followed = follow.FollowedCheckpoints(store)
        for step in range(3):
            store.save({"x": torch.zeros(step + 1)}, step=step)
            assert followed.readable_line("default")[1] == 4 * (step + 1)
    assert len(followed._sizes) == 1


def test_follow_recovers_from_a_head_record_that_was_damaged(tmp_path: Path) -> None:
    """Test that the line is read again after a repair, although the names of the records are the same."""
    with asymcheck.Store.open(tmp_path / "store", create=True) as store:
        store.training.begin_generation(store.save({"x": 1}, step=1))
        (head,) = (tmp_path / "store" / "heads" / "default").iterdir()
        intact = head.read_bytes()
        head.write_bytes(bytes(len(intact)))
        followed = follow.FollowedCheckpoints(store)
        assert followed.readable_line("default") == ([], 0)
        head.write_bytes(intact)
        assert [item.step for item in followed.readable_line("default")[0]] == [1]


def test_follow_refuses_an_invalid_run(tmp_path: Path) -> None:
    """Test that the command ends, because no look could succeed."""
    asymcheck.Store.open(tmp_path / "store", create=True).close()
    assert run_command("inspect", tmp_path / "store", "--follow", "--run", "../x").status == exit_status.USAGE


@pytest.mark.slow
def test_follow_prints_a_table_each_second_without_a_terminal(tmp_path: Path) -> None:
    """Test that a pipe receives tables while the command runs."""
    with asymcheck.Store.open(tmp_path, create=True) as store:
        store.save({"epoch": 1}, step=7)
    command = [sys.executable, "-m", "asymcheck", "inspect", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = 0
        while shown < 2:
            shown += process.stdout.readline().split()[:3] == ["default", "none", "7"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0
