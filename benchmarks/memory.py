"""``memory``: peak memory of an operation beyond the memory that its process used before, and the state's size.

Run each operation in a new process. A load into new tensors needs at least the size of the state. A save, and a load
into existing tensors, need none of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import asymcheck
from asymcheck.cli.main import commands
from benchmarks import environment, peers, resident, states
from benchmarks.report import Report, row

OPERATIONS = {"save": "save", "load": "load", "load-into": "load into"}


def run(folder: Path | None, *, quick: bool, state: dict[str, object] | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``state`` replaces GPT-2 with AdamW."""
    rounds = 1 if quick else 3
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state = state or states.gpt2_adamw(2 if quick else 12)
        size = sum(tensor.nbytes for tensor in states.tensors_of(state))
        description = states.describe(state)
        state_file = Path(scratch) / "state.pt"
        torch.save(state, state_file)
        peaks: dict[str, list[resident.Peak]] = {}
        for number in range(rounds):
            for operation, name in OPERATIONS.items():
                store = _store(Path(scratch) / f"{operation}-{number}", state, empty=operation == "save")
                peaks.setdefault(name, []).append(resident.of_operation([operation, store, state_file]))
        store = _store(Path(scratch) / "commands", state, empty=False)
        skipped = []
        for name, arguments in _commands(store, state, Path(scratch)).items():
            if name not in commands.commands:
                skipped.append(name)
                print(f"skipped: this version has no command asymcheck {name}")
                continue
            peaks[name] = [resident.of_command(arguments)]
        described = environment.describe(Path(scratch))
    described["state"] = description
    described["skipped"] = ", ".join(skipped) or "nothing"
    results = []
    for name, values in peaks.items():
        results += [
            row(name, "peak memory", "MB", [peak.resident / 1e6 for peak in values]),
            row(name, "peak memory without files", "MB", [peak.private / 1e6 for peak in values]),
        ]
    results.append(row("state", "size", "MB", [size / 1e6]))
    ratios = {f"{name}_peak/state": max(peak.resident for peak in values) / size for name, values in peaks.items()}
    return Report("memory", described, results, {name.replace(" ", "_"): value for name, value in ratios.items()})


def _store(where: Path, state: dict[str, object], *, empty: bool) -> Path:
    with asymcheck.Store.open(where, create=True) as store:
        if not empty:
            store.save(state, step=1)
    return where


def _commands(store: Path, state: dict[str, object], scratch: Path) -> dict[str, list[object]]:
    source = scratch / "source.safetensors"
    peers.Safetensors().save(states.named_tensors(state), source)
    return {
        "restore": ["restore", store, "--to", scratch / "restored.safetensors"],
        "convert": ["convert", source, scratch / "converted"],
    }
