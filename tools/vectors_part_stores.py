"""Create the frozen stores of one job: four ranks on two machines, and runs with damage and shards in the first store.

The library saves the states. The damage is made afterwards.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
import tempfile
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it

import asymcheck
from asymcheck import Checkpointer, Ranks, Store, TensorShard
from asymcheck.config import CaptureConfig
from asymcheck.format import layout
from asymcheck.format.pack import decode_pack_header
from asymcheck.types import PackId
from tools.codec_payloads import identity, pack_of
from tools.vectors_base import fixed_bytes, flipped
from tools.vectors_encoded_stores import CONFIG, RANKS, describe_ranks, rank_states, save_ranks
from tools.vectors_stores import REGISTRY, Facts, describe, freeze, write_expected

MACHINES = 2
SMALL = dataclasses.replace(CONFIG, inline_bytes=640)
"""Settings that keep all tensors in the manifest but the shards and the replica of the run ``job``."""
WHY = "the stores of one job on two machines; an index and copies of partitions are damaged, a tensor lacks elements"


def make_part_stores(out: Path) -> list[Path]:
    """Write the stores below ``out``, replacing those of this version; return the path."""
    folder = out / f"v1-by-{asymcheck.__version__}-parts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        stores = [Path(scratch) / f"store-{machine}" for machine in range(MACHINES)]
        _train(Path(scratch))
        facts = [_describe_job(stores[0]), *_save_shards(stores[0]), _save_copies(stores[0]), _save_scanned(stores[0])]
        for machine, path in enumerate(stores):
            shutil.rmtree(path / layout.LOCKS)
            freeze(path, folder / path.name, folder / f"catalog-{machine}.json")
    newest = {str(fact["run"]): fact["save_id"] for fact in facts}
    write_expected(folder, {"why": WHY, "checkpoints": facts, "newest": newest})
    shutil.copyfile(REGISTRY, folder / "registry.json")
    return [folder]


def _train(scratch: Path) -> None:
    """Save the run ``job``, each rank in a process of its own."""
    meeting = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_train_rank, args=(scratch, meeting.port, rank)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _train_rank(scratch: Path, port: int, rank: int) -> None:
    machine = rank // (RANKS // MACHINES)
    keys = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    ranks = Ranks(rank, RANKS, keys, timeout_s=60.0, node=f"machine-{machine}")
    memory = scratch / f"memory-{machine}"
    memory.mkdir(exist_ok=True)
    capture = CaptureConfig(ring_folder=str(memory))
    with Store.open(scratch / f"store-{machine}", config=SMALL, create=True) as store:
        state = rank_states()[0][rank]
        with Checkpointer(store, state, run="job", every=1, keep=None, ranks=ranks, capture=capture) as checkpointer:
            checkpointer.restore()
            checkpointer.step(5, metrics={"loss": 0.5})
            checkpointer.wait("local")


def _describe_job(path: Path) -> Facts:
    states, merged = rank_states()
    with Store.open(path, read_only=True) as store:
        (checkpoint,) = store.checkpoints("job")
    each = RANKS // MACHINES
    spans = [[[first, first + each - 1]] for first in range(0, RANKS, each)]
    return {**describe_ranks(checkpoint, states, merged), "store_ranks": spans}


def _save_shards(path: Path) -> list[Facts]:
    """Save a tensor whose rows share only an alias, and a tensor whose shards overlap and lack its last row."""
    whole = torch.arange(5 * 8, dtype=torch.float32).reshape(5, 8)
    ranges = ((0, 2), (2, 5), (0, 3), (1, 4))
    shards = [TensorShard(whole[begin:end].clone(), (5, 8), (begin, 0)) for begin, end in ranges]
    tied: list[object] = [{"encoder": shards[0], "tied": shards[0]}, {"head": shards[1], "tied": shards[1]}]
    lacking: list[object] = [{"shard": shard, "bias": whole[0]} for shard in shards[2:]]
    with Store.open(path, config=SMALL, create=True) as store:
        aliases = save_ranks(store, "aliases", tied)[0]
        lacks = save_ranks(store, "lacking", lacking)[0]
    # No rank ties these two tensors, so the library does not either.
    merged = {"encoder": whole, "tied": whole, "head": whole.clone()}
    rest = {**describe_ranks(lacks, lacking, {"bias": whole[0]}), "lacks": ["shard"]}
    return [describe_ranks(aliases, tied, merged), rest]


def _save(path: Path, run: str, *names: str) -> tuple[Facts, Path]:
    """Save tensors of fixed bytes; return the expected result, and the new pack."""
    state = {name: torch.frombuffer(bytearray(fixed_bytes(name, 700)), dtype=torch.uint8) for name in names}
    before = set((path / layout.PACKS).iterdir())
    with Store.open(path, config=SMALL, create=True) as store:
        facts = describe(store.save(state, step=1, run=run), state)
    (pack,) = set((path / layout.PACKS).iterdir()) - before
    return {**facts, "on_line": True}, pack


def _save_copies(path: Path) -> Facts:
    """Save two partitions, copy both into another pack, and damage another one in each pack."""
    facts, pack = _save(path, "copies", "first", "second")
    plains = [fixed_bytes(name, 700) for name in ("first", "second")]
    place = PackId(fixed_bytes("copies", 16))
    copy = pack.with_name(layout.pack_name(place))
    copy.write_bytes(pack_of([identity(plain) for plain in plains], place).data)
    for damaged, plain in zip((pack, copy), plains, strict=True):
        _flip(damaged, damaged.read_bytes().index(plain))
    return facts


def _save_scanned(path: Path) -> Facts:
    """Save a pack, and damage an entry in its index."""
    facts, pack = _save(path, "scanned", "third")
    _flip(pack, decode_pack_header(pack.read_bytes()[:4096], pack.name).index_offset + 64)
    return facts


def _flip(path: Path, offset: int) -> None:
    path.write_bytes(flipped(path.read_bytes(), offset))
