"""Test every workload on a small state, and that its report follows the schema."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
import torch.distributed.checkpoint as dcp

import asymcheck
from asymcheck import Store
from benchmarks import (
    __main__,
    batch,
    catalog,
    codec,
    coldness,
    dedupe,
    durable,
    goodput,
    gpu,
    hdfs,
    link,
    memory,
    merge,
    models,
    objects,
    packers,
    peers,
    publish,
    ranks,
    reshard,
    resident,
    restore,
    small,
    stall,
    states,
    synthetic,
    training,
)
from benchmarks import bytes as bytes_workload
from benchmarks.async_peers import ASYNC, SYNC
from benchmarks.plot import draw
from benchmarks.report import Report, rotated, row, write_json
from tests.architecture.source_tree import REPOSITORY
from tools.local_hdfs import LocalHdfs

# Hide warnings of peers: torch about a process group, matplotlib about fonts, torchsnapshot about open loops.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SCHEMA = json.loads((REPOSITORY / "benchmarks" / "report.schema.json").read_text())
TINY = training.Shape(1, 64, 16, 2)
PNG = b"\x89PNG\r\n\x1a\n"
GRID = models.Grid(["GPT-2"], "tiny", {1: 4, 10: 11}, ["asymcheck +S+O", "safetensors", "PCcheck (reimplemented)"])


def _goodput(folder: Path) -> Report:
    """Run goodput with invented figures, because the workload ``models`` has its own test."""
    source = folder.parent / "models.json"
    model = "made-up"
    measures = {"time to durable": 900.0, "visible stall": 30.0, "iteration": 1000.0}
    results = [row("asymcheck +S+O", f"{name}, {model}, every 10", "ms", [value]) for name, value in measures.items()]
    results += [row("asymcheck +S+O", f"{name}, {model}", "ms", [400.0]) for name in ("steps lost", "recovery")]
    write_json(Report("models", {"state": "made up", "date": "now"}, results, {"x": 1.0}), source)
    return goodput.run(folder, quick=True, source=source)


RUNS: dict[str, Callable[[Path], Report]] = {
    "durable": lambda folder: durable.run(folder, quick=True, state=states.small()),
    "restore": lambda folder: restore.run(folder, quick=True, state=states.small()),
    "small": lambda folder: small.run(folder, quick=True, width=16),
    "catalog": lambda folder: catalog.run(folder, quick=True, shape=synthetic.Shape(2000, 20)),
    "memory": lambda folder: memory.run(folder, quick=True, state=states.small()),
    "stall": lambda folder: stall.run(folder, quick=True, shape=stall.Shape(1, 64, (stall.Plan(1, 3),))),
    "link": lambda folder: link.run(folder, quick=True, shape=link.Shape(1, 64, (1.0,), 1)),
    "gpu": lambda folder: gpu.run(folder, quick=True),
    "batch": lambda folder: batch.run(folder, quick=True, state=states.small(), sizes=[4 << 20, 8 << 20]),
    "codec": lambda folder: codec.run(folder, quick=True, shape=TINY),
    "bytes": lambda folder: bytes_workload.run(folder, quick=True, shape=TINY, count=2),
    "ranks": lambda folder: ranks.run(folder, quick=True, shape=ranks.Shape((2, 4), 4, 8, (1, 2), 1 << 20, 2)),
    "objects": lambda folder: objects.run(folder, quick=True, state=states.small(), trained=TINY),
    "merge": lambda folder: merge.run(folder, quick=True, layers=0),
    "reshard": lambda folder: reshard.run(folder, quick=True, layers=0),
    "dedupe": lambda folder: dedupe.run(folder, quick=True, shape=dedupe.Shape((1, 64), 2, (1, 64), 1)),
    "models": lambda folder: models.run(folder, quick=True, grid=GRID),
    "goodput": _goodput,
    "publish": lambda folder: publish.run(folder, quick=True),
}
QUICK = ("goodput", "catalog", "bytes")
"""Workloads that take a second or two; `make test` runs them."""
LONG = (
    *("models", "reshard", "small", "dedupe", "ranks", "memory", "merge", "stall", "restore", "objects", "batch"),
    *("publish", "link"),
)
"""Workloads that start many processes, train or take many seconds; `make check` runs all but these."""
MARKS = {name: pytest.mark.long if name in LONG else pytest.mark.slow for name in RUNS if name not in QUICK} | {
    "gpu": pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
}


def test_every_workload_has_a_test() -> None:
    """Test that the tests below cover all workloads; hdfs needs a cluster, and has a separate test."""
    assert {*RUNS, "hdfs"} == set(__main__.WORKLOADS)
    assert tuple(SCHEMA["properties"]["workload"]["enum"]) == __main__.WORKLOADS


@pytest.mark.parametrize("workload", [pytest.param(name, marks=MARKS.get(name, ())) for name in RUNS])
def test_workload_report_follows_the_schema(workload: str, tmp_path: Path) -> None:
    """Test valid JSON, medians between minimum and maximum, and an empty folder afterwards."""
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


def test_without_cuda_the_gpu_workload_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test status 1 without measurements and files; --size is only for this workload."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        __main__.main(["gpu", "--quick", "--folder", str(tmp_path), "--size", "2"])
    for words in (["stall", "--size", "2"], ["gpu", "--size", "-1"]):
        with pytest.raises(SystemExit) as caught:
            __main__.main(words)
        assert caught.value.code == 2
    assert "--size is a positive number" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_gpu_workload_runs_on_any_device(tmp_path: Path) -> None:
    """Test everything except the link: the CPU replaces a device, with the smallest model."""
    shape = gpu.Shape(0.0, 16, 1, 8, rounds=2, every=3)
    peer = "torch DCP async staged"
    systems = gpu.OURS | {"torch.save sync": SYNC["torch.save sync"], peer: ASYNC[peer]}
    report = gpu.measure(tmp_path, shape, torch.device("cpu"), systems)
    counts = {(item.system, item.metric): item.n for item in report.results}
    for system in systems:
        for metric in ("visible stall, every 3", "host stall", "time to durable"):
            assert counts[system, metric] == 2, (system, metric)
    assert counts["asymcheck immediate", "capture"] == 2
    assert counts["asymcheck immediate", "visible stall, every 3, one sequence"] == 4
    assert counts["asymcheck load", "time to restore onto the device"] == 2
    report.ratios["slowdown_every_10"] = report.ratios["slowdown_every_3"]
    document = dataclasses.asdict(report)
    with pytest.raises(jsonschema.ValidationError, match="capture/limit"):
        jsonschema.validate(document, SCHEMA)
    document["ratios"]["capture/limit"] = 0.5
    document["environment"]["device"] = "none"
    jsonschema.validate(document, SCHEMA)
    assert not list(tmp_path.iterdir())


def test_the_state_of_the_gpu_workload_has_the_size_that_was_asked_for() -> None:
    """Test that the number of layers gives the size to within half a layer."""
    for gigabytes in (3.0, 14.0, 70.0):
        shape = dataclasses.replace(gpu.FULL, gigabytes=gigabytes)
        parameters = shape.layers * 12 * shape.width**2 + (50_257 + shape.context) * shape.width
        assert abs(12 * parameters - gigabytes * 1e9) < 0.51 * 12 * 12 * shape.width**2


@pytest.mark.long
def test_workload_hdfs_on_a_real_cluster(tmp_path: Path) -> None:
    """Test pushes, restores and counts, and that the files are removed."""
    shape = hdfs.Shape(1, 1, (1,), TINY, 2)
    report = hdfs.run(tmp_path, quick=True, shape=shape, state=states.small(4))
    jsonschema.validate(dataclasses.asdict(report), SCHEMA)
    metrics = {(item.system, item.metric): item.median for item in report.results}
    # A descriptor, and for each checkpoint a pack and a manifest.
    assert metrics["asymcheck push", "files of 2 checkpoints"] == 5
    assert metrics["torch.save + put", "files of 2 checkpoints"] == 2
    # A file for each tensor and the metadata; the bytes are those of the state with a margin for small tensors.
    assert metrics["torch DCP through fsspec", "files of 2 checkpoints"] == 4
    whole_state_ratios = metrics["torch.save + put", "2 checkpoints there"]
    assert metrics["torch DCP through fsspec", "2 checkpoints there"] == pytest.approx(whole_state_ratios, rel=0.25)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_dcp_through_fsspec_writes_a_checkpoint(tmp_path: Path) -> None:
    """Test that the checkpoint that the workload ``hdfs`` counts can be fetched and loaded by torch."""
    # Skip only this test if the client is not installed.
    from hdfs_native import Client

    from benchmarks import hdfs_fsspec

    state = {"model": {"w": torch.randn(100, 200)}, "epoch": 3}
    (tmp_path / "base").mkdir()
    with LocalHdfs(tmp_path / "base") as cluster:
        hdfs_fsspec.save(state, f"{cluster.url}/dcp")
        client, back = Client(cluster.url), tmp_path / "back"
        back.mkdir()
        for found in client.list_status("/dcp"):
            (back / Path(found.path).name).write_bytes(client.read(found.path).read())
    loaded = {"model": {"w": torch.zeros(100, 200)}, "epoch": 0}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(back))
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    assert loaded["epoch"] == 3


def test_without_java_the_workload_hdfs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test one line of error, before anything is created."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="found no java"):
        hdfs.run(tmp_path, quick=True)


def test_the_schema_refuses_a_report_without_its_ratios() -> None:
    """Test that each workload must return its named ratios."""
    environment = dict.fromkeys(SCHEMA["properties"]["environment"]["required"], "x")
    report = Report("durable", environment, [row("asymcheck new", "throughput", "GB/s", [1.0])], {"other": 1.0})
    with pytest.raises(jsonschema.ValidationError, match="durable_new/limit"):
        jsonschema.validate(dataclasses.asdict(report), SCHEMA)


@pytest.mark.slow
def test_the_command_writes_json_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Test that ``python -m benchmarks`` prints the environment, measures, and writes both files."""
    monkeypatch.setattr(catalog, "QUICK", synthetic.Shape(200, 4))
    files = tmp_path / "report.json", tmp_path / "report.png"
    __main__.main(["catalog", "--quick", "--folder", str(tmp_path), "--json", str(files[0]), "--plot", str(files[1])])
    jsonschema.validate(json.loads(files[0].read_text()), SCHEMA)
    assert files[1].read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert printed.startswith("date: ")
    assert "commit_ms_at_4/commit_ms_at_1 = " in printed


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_peers_restore_the_saved_state(peer: peers.Peer, tmp_path: Path) -> None:
    """Test every way to restore from every peer, bit for bit, also after a second save."""
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
    """Test each file, each folder, and the name in the parent folder, as for asymcheck."""
    (tmp_path / "peer" / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (tmp_path / "peer" / name).write_bytes(b"x")
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    peers.sync(tmp_path / "peer")
    names = (".", "peer", "peer/a", "peer/inner", "peer/inner/b")
    assert synced == {str((tmp_path / name).resolve()) for name in names}


def test_restore_refuses_a_peer_that_restores_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a fast but wrong read is an error."""

    def wrong(_peer: peers.Peer) -> dict[str, Callable[[Path], peers.Tensors]]:
        return {"wrong": lambda where: {name: tensor + 1 for name, tensor in torch.load(where).items()}}

    monkeypatch.setattr(peers.TorchSave, "loads", wrong)
    with pytest.raises(RuntimeError, match=r"wrong restored .* tensors that differ from the saved ones"):
        restore.run(tmp_path, quick=True, state=states.small(1))


def test_cold_files_are_out_of_the_page_cache(tmp_path: Path) -> None:
    """Test that written files are in the page cache, and that no byte is after make_cold."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert coldness.cached_bytes([path]) == 1 << 20
    how = coldness.make_cold([path])
    if how.startswith("in part"):
        pytest.skip(f"this file system keeps its files in memory ({how})")
    assert coldness.cached_bytes([path]) == 0
    assert len(path.read_bytes()) == coldness.cached_bytes([path])


def test_the_synthetic_store_is_a_store(tmp_path: Path) -> None:
    """Test that ``verify`` finds nothing, and that the newest checkpoint references every partition."""
    synthetic.build(tmp_path / "store", synthetic.Shape(120, 6))
    with Store.open(tmp_path / "store", create=True) as store:
        assert store.verify() == []
        assert [checkpoint.step for checkpoint in store.checkpoints()] == list(range(6))
        _, tensors = store.tensors()
        named = {partition.digest for tensor in tensors for partition in tensor.partitions}
        assert len(named) == 120
        assert store.gc().kept_packs == 6


@pytest.mark.long
def test_peak_memory_is_that_of_the_operation(tmp_path: Path) -> None:
    """Test that a load into new tensors needs the size of the state, and a load into existing ones does not."""
    state = states.small(100)
    torch.save(state, tmp_path / "state.pt")
    with Store.open(tmp_path / "store", create=True) as store:
        store.save(state, step=1)
    peaks = {
        name: resident.of_operation([name, tmp_path / "store", tmp_path / "state.pt"]) for name in ("load", "load-into")
    }
    assert 100e6 <= peaks["load"].private <= peaks["load"].resident
    assert peaks["load-into"].resident < 50e6


def test_everybody_is_first_once() -> None:
    """Test the rotation, so that no system always follows the same one."""
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 1)) == ["a", "b", "c"]


def test_sizes_of_batches_are_enough_for_a_curve() -> None:
    """Test at least eight sizes, from one partition on."""
    assert len(batch.SIZES) >= 8
    assert sorted(set(batch.SIZES)) == list(batch.SIZES)
    assert batch.SIZES[0] == asymcheck.StoreConfig().partition_bytes


def test_the_size_of_a_pack_is_that_of_a_batch(tmp_path: Path) -> None:
    """Test a state of eight MB in packs of two MiB, which needs about five syncs."""
    config = asymcheck.StoreConfig(partition_bytes=1 << 20, pack_bytes=2 << 20)
    synced: list[str] = []
    with Store.open(tmp_path / "store", config=config, create=True) as store:
        with asymcheck.events.observe(lambda event: synced.append(event.name)):
            store.save(states.small(8), step=1)
        assert store.resources.usage().packs == synced.count("pack.synced") >= 4


@pytest.mark.parametrize("packer", packers.packers(), ids=lambda packer: packer.name)
def test_a_packer_that_changes_bytes_is_refused(packer: packers.Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a good ratio with wrong bytes is an error."""
    values = torch.randn(50_000)
    piece = packers.Kind("weights", "float32", values.numpy().tobytes())
    assert codec.measure(packer, [piece], 2, 2).ratio > 1
    assert piece.plain == values.numpy().tobytes()
    unpack = packer.unpack
    monkeypatch.setattr(packer, "unpack", lambda packed, of: bytes(unpack(packed, of))[:-1] + b"x")
    with pytest.raises(RuntimeError, match="changed weights float32"):
        codec.measure(packer, [piece], 1, 1)


def test_weights_of_mixed_precision_are_the_rounded_master() -> None:
    """Test that the weights cost nothing, and that other weights are an error."""
    run = training.VARIANTS["mixed"](training.pretrained(TINY))
    run.train(2)
    states_of = {0: training.snapshot(run)}
    run.train(1)
    states_of[10] = training.snapshot(run)
    ratios = codec.whole_state_ratios(states_of, 10)
    assert 1.2 < ratios["ratio_mixed_state_single"] < ratios["ratio_mixed_state_10_apart"]
    next(iter(states_of[10]["model"].values()))[0, 0] += 1
    with pytest.raises(RuntimeError, match="not the rounded master"):
        codec.whole_state_ratios(states_of, 10)


def test_only_adapters_change_in_a_low_rank_run() -> None:
    """Test that frozen weights have the same bytes in every checkpoint, and that all other weights change."""
    start = training.pretrained(TINY)
    for name, variant in training.VARIANTS.items():
        run = variant(start)
        before = {key: tensor.clone() for key, tensor in states.named_tensors(run.state()["model"]).items()}
        run.train(2)
        after = states.named_tensors(run.state()["model"])
        changed = {key for key, tensor in after.items() if not tensor.equal(before[key])}
        if name == "lora":
            assert changed
            assert all(key.endswith((".up", ".down")) for key in changed)
        else:
            assert len(changed) > len(before) // 2


def test_bytes_on_the_drive_are_those_of_files(tmp_path: Path) -> None:
    """Test that the size of a folder is the sum of its files, without holes."""
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_bytes(os.urandom(8192))
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    assert peers.on_drive(tmp_path / "a") == 8192
    assert peers.on_drive(tmp_path) == 16384
