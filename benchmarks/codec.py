"""``codec``: compression ratio and speed of our codecs and of other codecs on real training states.

Train the states. Group the tensors of each run by role and dtype, and cut them into pieces of 4 MiB, as a store does.
Decode and compare all pieces. Measure deltas against checkpoints that are 1, 10 and 100 steps older.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from asymcheck.codecs.derived import BFLOAT16
from asymcheck.codecs.encode import encode_derived
from asymcheck.format.digest import digest
from asymcheck.state.names import role_of
from benchmarks import environment, training
from benchmarks.packers import (
    DELTA,
    OURS_COUNT,
    PLANES,
    ZIPNN,
    Kind,
    Packer,
    delta_packer,
    packers,
    planes_packer,
    threads,
)
from benchmarks.report import Report, Row, row
from benchmarks.states import named_tensors, unique
from benchmarks.training import State

_PIECE = 4 << 20
# Sample per kind. A few tensors are representative, and zlib compresses only 20 MB per second.
_PIECES_MAX = 4
GAPS, QUICK_GAPS = (1, 10, 100), (1, 10)
_MIXED = "mixed"


@dataclasses.dataclass
class Measured:
    """Measurements of one packer on one kind of data."""

    plain_bytes: int
    ratio: float
    encode_s: list[float]
    decode_s: list[float]


def run(folder: Path | None, *, quick: bool, shape: training.Shape | None = None) -> Report:
    """Train, then measure; ``shape`` replaces the model."""
    shape = shape or (training.QUICK if quick else training.FULL)
    gaps = QUICK_GAPS if quick else GAPS
    start = training.pretrained(shape)
    results: list[Row] = []
    ratios: dict[str, float] = {}
    for name, variant in training.VARIANTS.items():
        print(f"{name}: training {gaps[-1]} steps")
        states = _states(variant(start), gaps)
        kinds = _kinds(states[gaps[-1]])
        # Measure other codecs on the run that has every kind of tensor.
        all_packers = packers() if name == _MIXED else packers()[:OURS_COUNT]
        measured = _measure_all(name, kinds, all_packers, rounds=1 if quick else 5)
        results += [one for kind, done in measured.items() for one in _rows(kind, done)]
        for gap in gaps:
            results += _delta_rows(name, states[gap], states[0], gap, rounds=1 if quick else 2)
        if name == _MIXED:
            ratios |= whole_state_ratios(states, 10)
            ratios |= _against_zipnn(measured)
    described = environment.describe(folder or Path.cwd())
    count = sum(parameter.numel() for parameter in start.model.parameters())
    described["state"] = f"GPT-2 of {count / 1e6:.1f} million parameters with AdamW, {shape.steps} steps of training"
    described["skipped"] = "nothing" if any(one.name == ZIPNN for one in packers()) else "zipnn is not installed"
    return Report("codec", described, results, ratios)


def _states(run: training.Run, gaps: Sequence[int]) -> dict[int, State]:
    """Return the current state (0), and the states after each of the given numbers of steps."""
    run.train(1)
    states, done = {0: training.snapshot(run)}, 0
    for gap in gaps:
        run.train(gap - done)
        states[gap], done = training.snapshot(run), gap
    return states


def _kinds(state: State, older: State | None = None) -> dict[str, Kind]:
    """Return the floats of a state by role and dtype, with those of an older state."""
    parts: dict[tuple[str, str], list[bytes]] = {}
    for name, tensor in unique(named_tensors(state)).items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            role = "master" if name.startswith("master.") else role_of(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts.setdefault((role, dtype), []).append(_bytes_of(tensor))
    before = {} if older is None else _kinds(older)
    kinds = {f"{role} {dtype}": Kind(role, dtype, b"".join(found)) for (role, dtype), found in parts.items()}
    return {
        key: dataclasses.replace(kind, older=before[key].plain if key in before else None)
        for key, kind in kinds.items()
    }


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _measure_all(
    run: str, kinds: Mapping[str, Kind], all_packers: Sequence[Packer], rounds: int
) -> dict[str, dict[str, dict[int, Measured]]]:
    """Measure packers on every kind, on one thread and on all cores."""
    cores = sorted({1, len(os.sched_getaffinity(0))})
    return {
        f"{run} {key}": {
            packer.name: {count: measure(packer, _pieces(kind), rounds, count) for count in cores}
            for packer in all_packers
        }
        for key, kind in kinds.items()
    }


def _pieces(kind: Kind) -> list[Kind]:
    return kind.pieces(_PIECE)[:_PIECES_MAX]


def measure(packer: Packer, pieces: Sequence[Kind], rounds: int, workers: int) -> Measured:
    """Pack and unpack all pieces, and compare.

    Raises:
        RuntimeError: the unpacked bytes differ.
    """
    total = sum(len(piece.plain) for piece in pieces)
    digests = [digest(piece.plain) for piece in pieces]
    done = Measured(total, 0.0, [], [])
    with threads(workers) as mapped:
        for number in range(rounds + 1):
            prepared = list(map(packer.prepared, pieces))
            began = time.perf_counter()
            packed = list(mapped(packer.pack, prepared))
            encoded = time.perf_counter()
            plain = list(mapped(lambda pair: packer.unpack(*pair), list(zip(packed, pieces, strict=True))))
            decoded = time.perf_counter()
            if number == 0:
                # The first round warms up and is checked.
                if [digest(one) for one in plain] != digests:
                    raise RuntimeError(f"{packer.name} changed {pieces[0].name} {pieces[0].dtype}")
                done.ratio = total / sum(map(packer.size, packed))
            else:
                done.encode_s.append(encoded - began)
                done.decode_s.append(decoded - encoded)
    return done


def _rows(kind: str, done: Mapping[str, Mapping[int, Measured]]) -> Iterator[Row]:
    for name, by_threads in done.items():
        yield row(name, f"ratio, {kind}", "x", [by_threads[1].ratio])
        for count, one in by_threads.items():
            label = f"{count} thread{'s' if count > 1 else ''}, {kind}"
            yield row(name, f"encode, {label}", "GB/s", [one.plain_bytes / 1e9 / taken for taken in one.encode_s])
            yield row(name, f"decode, {label}", "GB/s", [one.plain_bytes / 1e9 / taken for taken in one.decode_s])


def _delta_rows(name: str, state: State, older: State, gap: int, rounds: int) -> Iterator[Row]:
    packer = delta_packer()
    for key, kind in _kinds(state, older).items():
        # Unchanged tensors are stored once, without any codec.
        if kind.older is not None and kind.older != kind.plain:
            done = {1: measure(packer, _pieces(kind), rounds, 1)}
            apart = f"{gap} step{'s' if gap > 1 else ''} apart"
            yield from _rows(f"{name} {key}", {f"{DELTA}, {apart}": done})


def whole_state_ratios(states: Mapping[int, State], gap: int) -> dict[str, float]:
    """Return the compression ratio of a whole mixed-precision state, by itself and with an older state as base.

    Each piece is stored with its best codec. Weights that are the rounded master are derived.
    """
    kinds = _kinds(states[gap], states[0])
    total = sum(len(kind.plain) for kind in kinds.values())
    master = kinds["master float32"].pieces(_PIECE)
    weights = kinds.pop("weights bfloat16").pieces(_PIECE // 2)
    derived = sum(map(_derived_size, weights, master))
    planes, delta = planes_packer(), delta_packer()
    alone = [(_size(planes, piece), piece) for kind in kinds.values() for piece in kind.pieces(_PIECE)]
    single = derived + sum(size for size, _ in alone)
    apart = derived + sum(min(size, _size(delta, piece)) for size, piece in alone)
    return {"ratio_mixed_state_single": total / single, f"ratio_mixed_state_{gap}_apart": total / apart}


def _size(packer: Packer, piece: Kind) -> int:
    return min(len(piece.plain), packer.size(packer.pack(piece)))


def _derived_size(piece: Kind, master: Kind) -> int:
    base = memoryview(master.plain)
    found = encode_derived(digest(piece.plain), memoryview(piece.plain), BFLOAT16, digest(base), base, 0)
    if found is None:
        raise RuntimeError("the weights are not the rounded master")
    return found.descriptor.stored_length


def _against_zipnn(measured: Mapping[str, Mapping[str, Mapping[int, Measured]]]) -> dict[str, float]:
    """Return the ratio and speed of our codecs relative to zipnn, for each tensor separately, on one thread."""
    if not all(ZIPNN in by_packer for by_packer in measured.values()):
        return {}
    stored, seconds = {}, {}
    for name in (PLANES, ZIPNN):
        measurements = [by_packer[name][1] for by_packer in measured.values()]
        stored[name] = sum(one.plain_bytes / one.ratio for one in measurements)
        seconds[name] = sum(statistics.median(one.encode_s) for one in measurements)
    return {"ratio/zipnn": stored[ZIPNN] / stored[PLANES], "encode_speed/zipnn": seconds[ZIPNN] / seconds[PLANES]}
