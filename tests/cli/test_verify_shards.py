"""Test that the merged reports of the shards of a verification are the report of the whole verification."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import asymcheck
from asymcheck.fsck import verify
from asymcheck.fsck.frame_scanner import Frame, FrameScanner
from asymcheck.fsck.verify import Finding, Severity, Shard, in_order
from asymcheck.storage.interfaces import OpenPack, StoreTier
from asymcheck.storage.nvme import NvmeTier
from asymcheck.storage.pack_index import bases_in
from asymcheck.storage.remote import RemoteTier, parse_location
from asymcheck.types import Part
from tests.cli.conftest import Outcome, run_command
from tests.cli.test_schemas import schema_of
from tests.crash.states import CONFIG, make_state
from tests.damage.flips import flip
from tests.docs.pages import blocks_of
from tests.fsck.damages import flip_index, flip_payload, packs
from tests.remote.test_reencoding import CONFIG as ENCODED
from tests.remote.test_reencoding import state_of
from tests.reshard.ranks import save_ranks

Call = Callable[..., Outcome]
KINDS = {
    *("damaged-copy", "damaged-frame", "damaged-head", "damaged-manifest", "damaged-pack", "empty-checkpoint"),
    *("foreign-file", "incomplete-checkpoint", "missing-head", "missing-partition", "no-checkpoint"),
    *("partial-tensor", "stale-temporary"),
}
"""Kinds of findings in the damaged store. Locked packs and lost bases have tests of their own."""


def save_steps(path: Path, steps: Sequence[int]) -> dict[int, list[Path]]:
    """Save steps; return the new packs of each."""
    new: dict[int, list[Path]] = {}
    with asymcheck.Store.open(path, config=CONFIG, create=True) as store:
        for step in steps:
            before = set(packs(path)) if (path / "packs").exists() else set()
            store.save(make_state(step), step=step)
            new[step] = sorted(set(packs(path)) - before)
    return new


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with damage of each kind."""
    folder = tmp_path_factory.mktemp("damaged")
    path, twin = folder / "store", folder / "twin"
    new = save_steps(path, range(8))
    with asymcheck.Store.open(path, config=CONFIG) as store:
        generation = store.training.begin_generation(store.checkpoints()[3])
        store.save(make_state(9), step=9, generation=generation)
        store.save({"x": 1}, step=40, part=Part(0, 2, "18" + "0" * 30))
        full = torch.arange(12.0).reshape(4, 3)
        save_ranks(store, [{"w": asymcheck.TensorShard(full[:2] + rank, (4, 3), (0, 0))} for rank in range(2)], 41)
        for run in ("empty", "headless", "torn"):
            saved = store.save({"x": torch.ones(5)}, step=1, run=run)
            generation = store.training.begin_generation(saved, run=run)
            store.save({"x": torch.ones(6)}, step=2, run=run, generation=generation)
    shutil.rmtree(path / "manifests" / "empty")
    (path / "heads" / "headless" / "00000002.head").unlink()
    for copy in (0, 4096):
        flip(path / "heads" / "torn" / "00000002.head", (copy + 10) * 8)
    flip(path / "asymcheck.store", 20 * 8)
    (path / "manifests" / "default" / f"{1:08d}-{50:012d}-{'18' + '1' * 30}").mkdir()
    flip(next((path / "manifests" / "default").glob("*-000000000005-*/*")), 3000)
    # The other copies of these partitions are intact.
    for pack in save_steps(twin, [7])[7]:
        copy = shutil.copyfile(pack, path / "packs" / pack.name)
        flip_payload(Path(copy), 0)
    flip_payload(new[0][0], 0)
    flip_payload(new[1][0], 1)
    flip_index(new[2][0])
    for pack in new[6]:
        pack.unlink()
    (path / "packs" / f"{'0' * 32}.tmp").write_bytes(b"")
    (path / "notes.txt").write_text("mine")
    return path


def reports_of(folder: Path, store: object, count: int, *words: object) -> list[Path]:
    """Verify all shards; return the files with the reports."""
    paths = []
    for index in range(count):
        outcome = run_command("verify", store, *words, "--shard", f"{index}/{count}", "--json")
        assert outcome.status == 0
        jsonschema.validate(outcome.json, schema_of("verify"))
        paths.append(folder / f"report-{index}.json")
        paths[-1].write_text(outcome.out)
    return paths


def findings_of(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return kind and place of each finding in reports."""
    documents = [json.loads(path.read_text()) for path in paths]
    return [(item["kind"], item["where"]) for document in documents for item in document["findings"]]


@pytest.mark.parametrize("stretch", [4096, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_merged_reports_are_the_report_of_the_whole(
    damaged: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, stretch: int
) -> None:
    """Test document, text and status, with damage of each kind, each of which one shard reports."""
    monkeypatch.setattr(verify, "_STRETCH_BYTES", stretch)
    paths = reports_of(tmp_path, damaged, count)
    for words in ((), ("--json",)):
        assert call("merge-reports", *reversed(paths), *words) == call("verify", damaged, *words)
    assert {kind for kind, _ in findings_of(paths)} == KINDS
    assert max(Counter(findings_of(paths)).values()) == 1
    assert count == 1 or sum(bool(findings_of([path])) for path in paths) > 1


@pytest.mark.parametrize("words", [("--step", 1), ("--step", 3), ("--step", 40), ("--run", "torn")])
def test_parts_of_a_store(damaged: Path, call: Call, tmp_path: Path, words: tuple[object, ...]) -> None:
    """Test one damaged step, an intact one, an incomplete one, and a run."""
    paths = reports_of(tmp_path, damaged, 3, *words)
    for more in ((), ("--json",)):
        assert call("merge-reports", *paths, *more) == call("verify", damaged, *words, *more)


def test_each_frame_is_read_once(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that the shards together read each frame, and the structure of each manifest, once."""
    read: Counter[tuple[str, int]] = Counter()
    trees: Counter[str] = Counter()
    whole, check_tree = FrameScanner.frames, verify.check_tree

    def counted(self: FrameScanner, pack: OpenPack, wanted: Sequence[int], *rest: Any) -> Iterator[Frame]:  # noqa: ANN401 - passed on
        read.update((pack.path.name, sequence) for sequence in wanted)
        return whole(self, pack, wanted, *rest)

    def counted_tree(tree: Any, rows: int, where: str) -> None:  # noqa: ANN401 - passed on
        trees[where] += 1
        check_tree(tree, rows, where)

    monkeypatch.setattr(FrameScanner, "frames", counted)
    monkeypatch.setattr(verify, "check_tree", counted_tree)
    run_command("verify", damaged)
    expected = read.copy(), trees.copy()
    read.clear(), trees.clear()
    reports_of(tmp_path, damaged, 5)
    assert (read, trees) == expected
    assert set(read.values()) == {1}
    assert set(trees.values()) == {1}


def shards_of(tier: StoreTier, count: int, *, deep: bool) -> list[Finding]:
    """Return the merged findings of all shards."""
    parts = [verify.verify(tier, deep=deep, shard=Shard(index, count)) for index in range(count)]
    assert len({content for _, content in parts}) == 1
    return in_order(finding for findings, _ in parts for finding in findings)


@pytest.mark.parametrize("deep", [True, False])
def test_locked_packs(damaged: Path, *, deep: bool) -> None:
    """Test that partitions that may be in locked packs are reported once, with all their checkpoints."""
    impatient = dataclasses.replace(CONFIG, read_lock_timeout_s=0.01)
    tier = NvmeTier(damaged, impatient, read_only=True)
    every = sorted(packs(damaged), key=lambda pack: pack.stat().st_size)
    locked = NvmeTier(damaged, CONFIG, read_only=True)
    with locked.locked(every[-2]) as first, locked.locked(every[-1]) as second:
        assert first
        assert second
        expected = verify.verify(tier, deep=deep)[0]
        assert {"busy-pack", "unchecked-partitions"} <= {finding.kind for finding in expected}
        for count in (2, 7):
            assert shards_of(tier, count, deep=deep) == expected


def test_a_lost_base(store_path: Path, tmp_path: Path) -> None:
    """Test that a lost pack with the bases of deltas is reported, also if no frame is read."""
    remote_config = dataclasses.replace(ENCODED.remote, pack_bytes=1 << 20)
    # With one slot, the frames of a save are always in the same order, and so in the same packs at the location.
    config = dataclasses.replace(ENCODED, remote=remote_config, slots=1)
    location = (tmp_path / "far").as_uri()
    with asymcheck.Store.open(store_path, config=config, create=True) as store:
        for step in range(3):
            store.save(state_of(step), step=step)
            store.push(location, step)
    with asymcheck.Store.open(location, config=config) as remote:
        remote.delete(0)
        assert remote.verify() == []
    tier = RemoteTier(parse_location(location), config)
    named = {
        name
        for listing in tier.manifests.checkpoints("default")
        for manifest in tier.manifests.read_all(listing)
        for name in manifest.partitions()
    }
    indexes = {pack_id: tier.open_pack(pack_id) for pack_id in tier.pack_ids()}
    bases = {base for index in indexes.values() for base in bases_in(index.entries).values()}
    of_bases = [
        pack_id
        for pack_id, index in indexes.items()
        if bases.intersection(names := set(index.digests())) and named.isdisjoint(names)
    ]
    (tmp_path / "far" / "packs" / f"{of_bases[0].hex()}.pack").unlink()
    for deep in (False, True):
        expected = verify.verify(tier, deep=deep)[0]
        errors = [finding for finding in expected if finding.severity is Severity.ERROR]
        lost = {name.split(" (")[0] for finding in errors for name in finding.checkpoints}
        assert lost == {"run default, step 1", "run default, step 2"}
        for count in (2, 7):
            assert shards_of(tier, count, deep=deep) == expected
    tier.close()


def refused(call: Call, *paths: Path) -> str:
    """Return the message about reports that cannot be merged."""
    outcome = call("merge-reports", *paths, "--json")
    assert (outcome.status, outcome.out) == (2, "")
    return outcome.err


def test_a_killed_shard_is_run_again(store: Path, call: Call, tmp_path: Path) -> None:
    """Test that the report of a killed shard is refused, and accepted after another run of the same command."""
    paths = reports_of(tmp_path, store, 3)
    words = [sys.executable, "-m", "asymcheck", "verify", str(store), "--shard", "1/3", "--json"]
    with paths[1].open("wb") as report:
        process = subprocess.Popen(words, stdout=report)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    message = refused(call, *paths)
    assert f"cannot merge {paths[1]}" in message
    assert "run 'asymcheck verify" in message.lower()
    assert "shards are missing: 1/3" in refused(call, paths[0], paths[2])
    with paths[1].open("wb") as report:
        subprocess.run(words, stdout=report, check=True)
    assert call("merge-reports", *paths) == call("verify", store)


def test_reports_that_do_not_belong_together(store: Path, call: Call, tmp_path: Path) -> None:
    """Test reports of other numbers of shards, of the same shard, of another store, of other checks, and no reports."""
    for name in ("two", "three", "far", "step", "shallow"):
        (tmp_path / name).mkdir()
    two, three = reports_of(tmp_path / "two", store, 2), reports_of(tmp_path / "three", store, 3)
    assert "different numbers of shards: 2 and 3" in refused(call, two[0], three[1])
    copy = shutil.copyfile(two[0], tmp_path / "copy.json")
    assert f"{two[0]} and {copy}: both are shard 0" in refused(call, two[0], copy, two[1])
    location = (tmp_path / "remote").as_uri()
    assert call("push", store, location, "--all").status == 0
    far = reports_of(tmp_path / "far", location, 2, "--deep")
    shallow = reports_of(tmp_path / "shallow", location, 2)
    assert "different stores" in refused(call, two[0], far[1])
    assert "different depths" in refused(call, far[0], shallow[1])
    step = reports_of(tmp_path / "step", store, 2, "--step", 20)
    assert "different runs" in refused(call, two[0], step[1])
    for content in ("", "{}", "[]", '{"shard": null, "findings": []}', call("verify", store, "--json").out):
        three[0].write_text(content)
        assert f"cannot merge {three[0]}: it is no report of a shard" in refused(call, *three)
    assert call("merge-reports").status == 2
    assert call("merge-reports", tmp_path / "none").status == 2


def test_a_store_that_changes_between_shards(store: Path, call: Call, tmp_path: Path) -> None:
    """Test a new checkpoint, which shards of one step ignore, and a pack that only some shards could read."""
    paths = reports_of(tmp_path, store, 2)
    (tmp_path / "one").mkdir()
    one = reports_of(tmp_path / "one", store, 2, "--step", 20)
    with asymcheck.Store.open(store) as opened:
        opened.save({"model": {"weight": torch.ones(3000)}}, step=50)
    for step, old in (((), paths), (("--step", 20), one)):
        old[1].write_text(call("verify", store, *step, "--shard", "1/2", "--json").out)
    assert "the store changed between the shards" in refused(call, *paths)
    assert call("merge-reports", *one) == call("verify", store, "--step", 20)
    paths[0].write_text(call("verify", store, "--shard", "0/2", "--json").out)
    assert call("merge-reports", *paths).status == 0
    packs(store)[0].unlink()
    paths[0].write_text(call("verify", store, "--shard", "0/2", "--json").out)
    assert "the store changed between the shards" in refused(call, *paths)


def test_text_of_a_shard(damaged: Path, store: Path, call: Call) -> None:
    """Test that a shard gives no verdict on the store, and that its status is 0."""
    outcome = call("verify", store, "--shard", "0/1")
    assert (outcome.status, outcome.out.count("shard 0/1: 0 findings; ")) == (0, 1)
    outcome = call("verify", damaged, "--shard", "0/1")
    assert outcome.status == 0
    assert "error damaged-frame: " in outcome.out
    assert "checked: " not in outcome.out


@pytest.mark.parametrize("words", ["3/3", "-1/3", "1", "1/0", "a/b"])
def test_shards_that_do_not_exist(call: Call, store: Path, words: str) -> None:
    """Test that numbers outside of 0 to N-1 are refused, as are shards of a repair."""
    outcome = call("verify", store, f"--shard={words}")
    assert outcome.status == 2
    assert "0 to N-1" in outcome.err
    assert call("verify", store, "--repair", "--shard", "0/2").status == 2


@pytest.mark.slow
def test_the_kubernetes_job_of_the_documentation(store: Path, call: Call, tmp_path: Path) -> None:
    """Test that its command verifies each shard once, with the variables that Kubernetes sets."""
    yaml = pytest.importorskip("yaml")
    page = (Path(__file__).resolve().parents[2] / "docs" / "machines.md").read_text("utf-8")
    (block,) = (block for block in blocks_of(page) if "kind: Job" in block.body)
    spec = yaml.safe_load(block.body)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    location = (tmp_path / "far").as_uri()
    assert call("push", store, location, "--all").status == 0
    words = [
        word.replace(f"{mount['mountPath']}/", f"{tmp_path}/") for word in (*container["command"], *container["args"])
    ]
    (tmp_path / "asymcheck").write_text(f'#!/bin/sh\nexec {sys.executable} -m asymcheck "$@"\n')
    (tmp_path / "asymcheck").chmod(0o755)
    assert spec["completionMode"] == "Indexed"
    for index in range(spec["completions"]):
        environment = {variable["name"]: location for variable in container["env"]}
        environment |= {"JOB_COMPLETION_INDEX": str(index), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(words, env={**os.environ, **environment}, check=True)
    assert call("merge-reports", *tmp_path.glob("report-*.json")) == call("verify", location, "--deep")
