"""Create a frozen store with every codec, kind of frame and encoding of planes, and a checkpoint of several ranks.

A remote layout with the same checkpoints is created from it by a push. The library saves the states. Its packs are then
replaced by packs whose encodings are chosen here, which a manifest does not notice.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import asymcheck
from asymcheck.codecs.zstd import Effort, compress
from asymcheck.commit.save_request import new_save_id
from asymcheck.format import layout
from asymcheck.format.pack import decode_index, decode_pack_header
from asymcheck.state.shards import TensorShard
from asymcheck.types import PackId, Part
from tools.codec_payloads import Stored, delta, derived, identity, pack_of, planes
from tools.vectors_base import fixed_bytes
from tools.vectors_stores import REGISTRY, Facts, describe, freeze, write_expected

CONFIG = asymcheck.StoreConfig(
    partition_bytes=8192, bundle_below_bytes=0, inline_bytes=64, compression="off", slots=1, repack_waste=1.0
)
STEPS = 10
"""Checkpoints of the run ``codecs``: one in full, eight deltas, and one in full again."""
RANKS = 4
TEXT = b"The same words come back, and the same words are found again: words, words, words. "


def make_encoded_stores(out: Path) -> list[Path]:
    """Write the store and the remote layout below ``out``, replacing those of this version; return the paths."""
    folders = [out / f"v1-by-{asymcheck.__version__}-{end}" for end in ("codecs", "remote")]
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        store, remote = Path(scratch) / "store", Path(scratch) / "remote"
        facts = [*_save_codecs(store), _save_ranks(store)]
        newest = {str(fact["run"]): fact["save_id"] for fact in facts}
        expected: Facts = {"checkpoints": facts, "newest": newest}
        with asymcheck.Store.open(store, config=CONFIG, create=True) as opened:
            for run in newest:
                opened.push(f"file://{remote}", run=run, everything=True)
        _doom_a_pack(remote)
        freeze(store, folders[0] / "store", folders[0] / "catalog.json")
        shutil.copytree(remote, folders[1] / "store")
        for path, why in zip(folders, ("every codec; four ranks", "copies of it; a pack is doomed"), strict=True):
            write_expected(path, {**expected, "why": why})
            shutil.copyfile(REGISTRY, path / "registry.json")
    return folders


def _weight(step: int) -> torch.Tensor:
    """Return weights that change a little from step to step, with noise in their fractions."""
    noise = torch.frombuffer(bytearray(fixed_bytes("weight", 4096)), dtype=torch.int16).float() / 65536
    weight = torch.linspace(-1, 1, 2048) + noise
    weight[step::7] *= 1 + 2**-20
    return weight * (1 + step * 2**-18)


def _state(step: int) -> dict[str, torch.Tensor]:
    weight = _weight(step)
    return {
        "weight": weight,
        "bfloat16": weight.bfloat16(),
        "float16": weight.half(),
        "counts": torch.arange(512, dtype=torch.int64) * 3 + step,
        "text": torch.frombuffer(bytearray((TEXT * 60)[:4096]), dtype=torch.uint8),
        "noise": torch.frombuffer(bytearray(fixed_bytes("noise", 2048)), dtype=torch.uint8),
    }


def _save_codecs(path: Path) -> Iterator[Facts]:
    """Save the steps of the run ``codecs``, and replace the packs by two packs of encoded partitions."""
    with asymcheck.Store.open(path, config=CONFIG, create=True) as store:
        for step in range(STEPS):
            checkpoint = store.save(_state(step), step=step, metrics={"loss": 1 / (step + 1)}, run="codecs")
            yield {**describe(checkpoint, _state(step)), "on_line": True}
    plains = set(_plains(path / layout.PACKS))
    shutil.rmtree(path / layout.PACKS)
    (path / layout.PACKS).mkdir()
    stored: dict[bytes, Stored] = {}
    for step in range(STEPS):
        for one in _encoded(step):
            assert one.plain in plains
            stored.setdefault(one.plain, one)
    assert set(stored) == plains
    # The next process that opens the store builds the catalog anew.
    shutil.rmtree(path / layout.CATALOG)
    # Bases are before and behind the frames that need them, and in another pack.
    rows = list(stored.values())
    for label, half in (("codecs-1", rows[1::2]), ("codecs-2", rows[::2][::-1])):
        place = PackId(fixed_bytes(label, 16))
        (path / layout.PACKS / layout.pack_name(place)).write_bytes(pack_of(half, place).data)


def _encoded(step: int) -> Iterator[Stored]:
    """Return the partitions of a step, each in the codec that its name stands for."""
    plain = {name: _bytes(tensor) for name, tensor in _state(step).items()}
    floats = [(len(plain["weight"]), 4, 1)]
    if step % 9:
        yield delta(plain["weight"], floats, _bytes(_weight(step - 1)))
    else:
        yield planes(plain["weight"], floats)
    yield derived(plain["bfloat16"], 1, plain["weight"], 0)
    yield derived(plain["float16"], 2, plain["weight"], 0)
    yield planes(plain["counts"], [(len(plain["counts"]), 8, 0)])
    yield Stored(plain["text"], compress(plain["text"], Effort.REPEATS), 0, 1)
    yield identity(plain["noise"])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def _plains(packs: Path) -> Iterator[bytes]:
    """Return the plain bytes of every frame, all of which have codec identity."""
    for path in packs.iterdir():
        data = path.read_bytes()
        header = decode_pack_header(data[:4096], path.name)
        for entry in decode_index(data[header.index_offset : header.pack_length], header, path.name):
            start = int(entry["offset"]) + int.from_bytes(data[int(entry["offset"]) + 72 :][:4], "little")
            yield data[start : start + int(entry["plain_length"])]


def rank_states() -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return the states of four ranks, and their merged state.

    Two shards of each tensor overlap, one tensor is a replica, one differs.
    """
    whole = torch.arange(9 * 64, dtype=torch.float32).reshape(9, 64)
    replica = torch.arange(300, dtype=torch.int32)
    states: list[dict[str, object]] = []
    for rank in range(RANKS):
        shard = TensorShard(whole[2 * rank : 2 * rank + 3].clone(), (9, 64), (2 * rank, 0))
        own = torch.frombuffer(bytearray(fixed_bytes(f"rank {rank}", 128)), dtype=torch.uint8)
        states.append({"model": {"shard": shard, "replica": replica}, "own": own, "rank": rank})
    return states, {"model": {"shard": whole, "replica": replica}, "own": states[0]["own"], "rank": 0}


def save_ranks(store: asymcheck.Store, run: str, states: Sequence[object]) -> list[asymcheck.Checkpoint]:
    """Save one checkpoint of several ranks into one store."""
    save_id = new_save_id().hex()
    parts = [Part(rank, len(states), save_id) for rank in range(len(states))]
    metrics = {"loss": 0.5}
    return [
        store.save(state, step=5, metrics=metrics, run=run, part=part)
        for state, part in zip(states, parts, strict=True)
    ]


def describe_ranks(checkpoint: asymcheck.Checkpoint, states: Sequence[object], merged: object) -> Facts:
    """Return the expected result of a reader for each rank, and for all ranks as one."""
    found = [describe(checkpoint, state) for state in [*states, merged]]
    described = [{"tree": facts["tree"], "tensors": facts["tensors"]} for facts in found]
    return {**found[0], "on_line": True, "parts": described[:-1], "merged": described[-1]}


def _save_ranks(path: Path) -> Facts:
    """Save a checkpoint of four ranks."""
    states, merged = rank_states()
    with asymcheck.Store.open(path, config=CONFIG, create=True) as store:
        return describe_ranks(save_ranks(store, "ranks", states)[0], states, merged)


def _doom_a_pack(remote: Path) -> None:
    """Announce the removal of a pack that is needed, as a collection does that was killed."""
    packs = sorted((remote / layout.PACKS).iterdir())
    pack_id = layout.parse_pack_name(packs[0].name)
    assert pack_id is not None
    packs[0].rename(packs[0].with_name(layout.doomed_name(pack_id, fixed_bytes("collection", 16))))
