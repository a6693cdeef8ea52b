"""Create the frozen stores of typed values (SPEC.md §A9), each with one checkpoint.

Generators of devices are left out, because they need a device.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import random
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np
import torch

import asymcheck
from asymcheck.format.registry import TYPED_VALUE
from asymcheck.format.typed_value import BIT_GENERATORS
from tools.vectors_stores import REGISTRY, describe, freeze, write_expected

CONFIG = asymcheck.StoreConfig(partition_bytes=4096, bundle_below_bytes=4096, inline_bytes=64, slots=1)
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30))


class Phase(enum.Enum):
    """Members with values of several kinds."""

    WARM = "warm"
    MAIN = (1, 2.5)


class Access(enum.IntFlag):
    """Flags that can be combined."""

    READ = 1
    WRITE = 2


class Best(NamedTuple):
    """Two values with names."""

    step: int
    weight: torch.Tensor


@dataclasses.dataclass
class Average:
    """A dataclass with a tensor and another dataclass."""

    weight: torch.Tensor
    rate: Rate
    updates: int = 0


@dataclasses.dataclass(frozen=True)
class Rate:
    """A dataclass that cannot change."""

    value: float


def make_typed_stores(out: Path) -> list[Path]:
    """Write the stores below ``out``, replacing those of this version; return their paths."""
    return [_make_typed_store(out, name) for name in STATES]


def _make_typed_store(out: Path, name: str) -> Path:
    folder = out / f"v1-by-{asymcheck.__version__}-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = STATES[name](0)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "store"
        with asymcheck.Store.open(path, config=CONFIG, create=True) as store:
            facts = describe(store.save(state, step=7, metrics={"loss": 0.25}), state)
        freeze(path, folder / "store", folder / "catalog.json")
    newest = {"default": facts["save_id"]}
    write_expected(
        folder,
        {
            "why": f"typed values up to the feature {name}",
            "checkpoints": [{**facts, "on_line": True}],
            "newest": newest,
        },
    )
    shutil.copyfile(REGISTRY, folder / "registry.json")
    return folder


def typed_state(change: int) -> dict[str, object]:
    """Return a state with every type of typed value. States of two changes have equal classes and shapes."""
    weight = torch.arange(600, dtype=torch.float32) + change
    return {
        "containers": _containers(change, weight),
        "classes": {
            "best": Best(5 + change, weight),
            "average": Average(weight * 2, Rate(0.5 + change), 3 + change),
            "phases": [Phase.MAIN if change else Phase.WARM, Phase.WARM if change else Phase.MAIN],
            "access": Access(3 - change),
        },
        "values": _values(change),
        "generators": {
            "torch": torch.Generator().manual_seed(change),
            "python": [random.Random(change), _with_gauss(change)],
            "numpy": {name: np.random.Generator(getattr(np.random, name)(change)) for name in BIT_GENERATORS},
        },
    }


def nested_state(change: int) -> dict[str, object]:
    """Return a state with members in sets and nested tensors."""
    values = torch.arange(24, dtype=torch.float32).reshape(2, 6, 2) + change
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 2])
    components = [torch.arange(6).reshape(2, 3) + change, torch.ones(4, 1, dtype=torch.int64)]
    return {
        "phases": [Phase.WARM, Access.READ],
        "seen": {Phase.WARM if change else Phase.MAIN, ("a", Access.READ), frozenset({Access.WRITE}), 7},
        "chosen": frozenset({Phase.MAIN, (change, Phase.WARM)}),
        "jagged": torch.nested.nested_tensor([values[0], values[1, :3]], layout=torch.jagged),
        "lengths": torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged),
        "strided": torch.nested.nested_tensor(components),
    }


STATES: dict[str, Callable[[int], dict[str, object]]] = {TYPED_VALUE: typed_state, "nested-tensor": nested_state}
"""States of the stores, by the last feature that they need."""


def _containers(change: int, weight: torch.Tensor) -> dict[str, object]:
    nested: defaultdict[str, object] = defaultdict(dict, a=defaultdict(list, b=[1, weight[:3] + 1]))
    return {
        "defaultdicts": [defaultdict(int, {"a": 1 + change, 5: 2}), defaultdict(None, a=change)],
        "nested": nested,
        "deque": deque([weight + 1, weight + 2], maxlen=4),
        "deques": [deque([1, "a", change]), deque(maxlen=0)],
        "set": {1 + change, "a", None, 2.5, False, b"x", 1j, (1, ("b",)), torch.Size([2]), torch.float32, np.int8(7)},
        "values in a set": {frozenset({1}), PurePosixPath("a"), dt.date(2026, 1, 1), dt.timedelta(1), range(3)},
        "frozenset": frozenset({("a", 1 << 70), torch.device("cpu"), -1 - change}),
        "empty": [set(), frozenset()],
    }


def _values(change: int) -> dict[str, object]:
    return {
        "paths": [PosixPath(f"runs/\u00e4/{change}"), PurePosixPath("/a/b"), PureWindowsPath("C:\\runs")],
        "dates": [dt.date(2024, 2, 29 - change), dt.date.min, dt.date.max],
        "times": [dt.time(23, 59, 59, 999_999 - change), dt.time(2, 30, tzinfo=EAST, fold=1)],
        "datetimes": [
            dt.datetime(2026, 11, 26, 1, 2, 3 + change),  # noqa: DTZ001 - without a time zone on purpose
            dt.datetime(2026, 11, 26, tzinfo=dt.timezone.utc),
            dt.datetime(1, 1, 1, 0, 0, 0, 7, tzinfo=EAST, fold=1),
        ],
        "timedeltas": [dt.timedelta(days=-3, microseconds=1 + change), dt.timedelta.min, dt.timedelta.max],
        "ranges": [range(10, 1 << 70, -3 - change), range(0)],
        "slices": [slice(None, 5 + change, -1), slice(None)],
    }


def _with_gauss(seed: int) -> random.Random:
    """Return a generator that keeps the second of two numbers."""
    generator = random.Random(seed)
    generator.gauss(0, 1)
    return generator
