"""Every workload runs on a small state and store, and reports what its schema promises."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch

from asymcheck import Store
from benchmarks import __main__, catalog, coldness, durable, memory, peers, resident, restore, stall, states, synthetic
from benchmarks.plot import draw
from benchmarks.report import Report, rotated, row, write_json
from tests.architecture.source_tree import REPOSITORY

# The peers' own: torch warns of a missing process group, matplotlib of fonts, and torchsnapshot leaves loops open.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SCHEMA = json.loads((REPOSITORY / "benchmarks" / "report.schema.json").read_text())
PNG = b"\x89PNG\r\n\x1a\n"
RUNS: dict[str, Callable[[Path], Report]] = {
    "durable": lambda folder: durable.run(folder, quick=True, state=states.small()),
    "restore": lambda folder: restore.run(folder, quick=True, state=states.small()),
    "catalog": lambda folder: catalog.run(folder, quick=True, shape=synthetic.Shape(2000, 20)),
    "memory": lambda folder: memory.run(folder, quick=True, state=states.small()),
    "stall": lambda folder: stall.run(folder, quick=True, shape=stall.Shape(1, 64, {1: 3})),
}


def test_every_workload_is_run_here() -> None:
    """The tests below leave none out."""
    assert tuple(RUNS) == __main__.WORKLOADS == tuple(SCHEMA["properties"]["workload"]["enum"])


@pytest.mark.parametrize(
    "workload", [pytest.param(name, marks=pytest.mark.slow) if name in ("memory", "stall") else name for name in RUNS]
)
def test_a_workload_reports_what_the_schema_says(workload: str, tmp_path: Path) -> None:
    """The JSON has the promised shape, median lies between least and greatest, and nothing is left in the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    report = RUNS[workload](folder)
    write_json(report, tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["workload"] == workload
    for item in document["results"]:
        assert item["min"] <= item["median"] <= item["max"], item
    assert not list(folder.iterdir())
    draw(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(PNG)


def test_the_schema_refuses_a_report_without_its_ratios() -> None:
    """The schema is no empty promise: each workload must give the ratios that it is named for."""
    environment = dict.fromkeys(SCHEMA["properties"]["environment"]["required"], "x")
    report = Report("durable", environment, [row("asymcheck new", "throughput", "GB/s", [1.0])], {"other": 1.0})
    with pytest.raises(jsonschema.ValidationError, match="durable_new/limit"):
        jsonschema.validate(dataclasses.asdict(report), SCHEMA)


def test_the_command_writes_json_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m benchmarks`` prints the environment first, then measures, and writes both files."""
    monkeypatch.setattr(catalog, "QUICK", synthetic.Shape(200, 4))
    files = tmp_path / "report.json", tmp_path / "report.png"
    __main__.main(["catalog", "--quick", "--folder", str(tmp_path), "--json", str(files[0]), "--plot", str(files[1])])
    jsonschema.validate(json.loads(files[0].read_text()), SCHEMA)
    assert files[1].read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert printed.startswith("date: ")
    assert "commit_ms_at_4/commit_ms_at_1 = " in printed


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_what_a_peer_saves_holds_the_state(peer: peers.Peer, tmp_path: Path) -> None:
    """Every way to restore from every peer gives the state back bit for bit, also after it was saved over."""
    state = states.small(1)
    where = tmp_path / "peer"
    for _ in range(2 if peer.overwrites else 1):
        states.change_everything(state)
        assert peers.save_durably(peer, states.named_tensors(state), where) > 0
    assert peers.files_in(where)
    ways = 0
    for load in peer.loads().values():
        assert not states.differing(state, load(where))
        ways += 1
    for fill in peer.fills().values():
        target = states.named_tensors(states.empty_like(state))
        addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
        assert len(states.differing(state, target)) == len(target)
        fill(where, target)
        assert not states.differing(state, target)
        assert {name: tensor.data_ptr() for name, tensor in target.items()} == addresses
        ways += 1
    assert ways


def test_peers_sync_every_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Durable means for peers what it means for asymcheck: each file, each folder, and the name in the folder above."""
    (tmp_path / "peer" / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (tmp_path / "peer" / name).write_bytes(b"x")
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    peers.sync(tmp_path / "peer")
    names = (".", "peer", "peer/a", "peer/inner", "peer/inner/b")
    assert synced == {str((tmp_path / name).resolve()) for name in names}


def test_restore_refuses_a_peer_that_restores_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is fast because it is wrong is an error, not a figure."""

    def wrong(_peer: peers.Peer) -> dict[str, Callable[[Path], peers.Tensors]]:
        return {"wrong": lambda where: {name: tensor + 1 for name, tensor in torch.load(where).items()}}

    monkeypatch.setattr(peers.TorchSave, "loads", wrong)
    with pytest.raises(RuntimeError, match=r"wrong restored .* tensors that are not what was saved"):
        restore.run(tmp_path, quick=True, state=states.small(1))


def test_cold_files_are_out_of_the_page_cache(tmp_path: Path) -> None:
    """What was just written lies in the page cache; made cold, none of it does."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert coldness.cached_bytes([path]) == 1 << 20
    how = coldness.make_cold([path])
    if how.startswith("in part"):
        pytest.skip(f"this file system keeps its files in memory ({how})")
    assert coldness.cached_bytes([path]) == 0
    assert len(path.read_bytes()) == coldness.cached_bytes([path])


def test_the_synthetic_store_is_a_store(tmp_path: Path) -> None:
    """``verify`` reads every byte of it and finds nothing; the newest checkpoint names every partition."""
    synthetic.build(tmp_path / "store", synthetic.Shape(120, 6))
    with Store.open(tmp_path / "store") as store:
        assert store.verify() == []
        assert [checkpoint.step for checkpoint in store.checkpoints()] == list(range(6))
        _, tensors = store.tensors()
        named = {partition.digest for tensor in tensors for partition in tensor.partitions}
        assert len(named) == 120
        assert store.gc().kept_packs == 6


@pytest.mark.slow
def test_peak_memory_is_that_of_the_operation(tmp_path: Path) -> None:
    """A load makes the state's bytes anew; a load into tensors that are there does not."""
    state = states.small(100)
    torch.save(state, tmp_path / "state.pt")
    with Store.open(tmp_path / "store") as store:
        store.save(state, step=1)
    peaks = {
        name: resident.of_operation([name, tmp_path / "store", tmp_path / "state.pt"]) for name in ("load", "load-into")
    }
    assert 100e6 <= peaks["load"].private <= peaks["load"].resident
    assert peaks["load-into"].resident < 50e6


def test_everybody_is_first_once() -> None:
    """The order rotates, so that none always follows the same one."""
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 1)) == ["a", "b", "c"]
