"""``merge``: seconds and memory of a mean of three checkpoints, compared with raw reads and writes and with mergekit.

The checkpoints have the weights of GPT-2 in float32. Each round measures all systems with their files dropped from the
page cache, and starts with a different system. *Raw* reads three files and writes one, by ``O_DIRECT``, and computes
nothing. asymcheck verifies every byte that it reads, and commits. mergekit merges the same weights in folders of
safetensors files. It is left out if it is not installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import asymcheck
from benchmarks import environment, raw, resident, states
from benchmarks.coldness import make_cold
from benchmarks.peers import files_in, fsync
from benchmarks.report import Report, rotated, row

RAW, OURS, MERGEKIT = "raw reads and write", "asymcheck merge", "mergekit linear"
STEPS = (1, 2, 3)
_LAYER_NAMES = (
    *("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias"),
    *("ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
)


def run(folder: Path | None, *, quick: bool, layers: int | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``; ``layers`` is the number of layers of GPT-2.

    Raises:
        RuntimeError: the merged weights are not the mean.
    """
    layers = (1 if quick else 12) if layers is None else layers
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        measured = _Merges(Path(scratch), layers)
        times = measured.measure(rounds=1 if quick else 5)
        memory = [measured.memory() for _ in range(1 if quick else 3)]
        described = environment.describe(Path(scratch))
    described["state"] = f"3 checkpoints of {layers} layers of GPT-2, {measured.nbytes / 1e6:.0f} MB each"
    described["made cold by"] = measured.made_cold
    described["skipped"] = "nothing" if MERGEKIT in times else "mergekit is not installed"
    results = [row(name, "time to durable", "s", values) for name, values in times.items()]
    results.append(row(OURS, "peak memory", "MB", [peak / 1e6 for peak in memory]))
    medians = {item.system: item.median for item in results if item.unit == "s"}
    ratios = {"merge/raw_io": medians[OURS] / medians[RAW], "memory_gb": max(memory) / 1e9}
    if MERGEKIT in medians:
        ratios["merge/mergekit"] = medians[OURS] / medians[MERGEKIT]
    return Report("merge", described, results, ratios)


class _Merges:
    """The sources in each system's format."""

    def __init__(self, scratch: Path, layers: int) -> None:
        self._scratch, self._layers = scratch, layers
        self._store = scratch / "store"
        self._raw = {step: scratch / f"raw-{step}" for step in (*STEPS, 0)}
        self._folders = {step: scratch / f"folder-{step}" for step in STEPS}
        self.made_cold = ""
        self.nbytes = 0
        self._sum: dict[str, torch.Tensor] = {}
        with asymcheck.Store.open(self._store, create=True) as store:
            for step in STEPS:
                torch.manual_seed(step)
                model = _model(layers)
                self._add(model)
                self.nbytes = sum(tensor.nbytes for tensor in model.values())
                store.save({"model": model}, step=step)
                self._limit = raw.Limit(list(model.values()))
                self._limit.write(self._raw[step])
                if _has_mergekit():
                    _write_folder(self._folders[step], model, layers)

    def _add(self, model: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in model.items():
            self._sum[name] = self._sum[name] + tensor.double() if name in self._sum else tensor.double()

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each system. The first round is a warm-up, and checks the result."""
        systems: dict[str, Callable[[], float]] = {RAW: self._read_and_write, OURS: self._merge}
        if _has_mergekit():
            systems[MERGEKIT] = self._mergekit
        times: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for name, call in rotated(list(systems.items()), number):
                self._begin_cold()
                seconds = call()
                if number:
                    times.setdefault(name, []).append(seconds)
            if not number:
                self._check()
        return times

    def _begin_cold(self) -> None:
        os.sync()
        folders = [self._store / "packs", *self._folders.values()]
        self.made_cold = make_cold([path for folder in folders for path in files_in(folder)])

    def _read_and_write(self) -> float:
        self._raw[0].unlink(missing_ok=True)
        return sum(self._limit.read(self._raw[step]) for step in STEPS) + self._limit.write(self._raw[0])

    def _merge(self) -> float:
        self._delete()
        began = time.perf_counter()
        with asymcheck.Store.open(self._store) as store:
            asymcheck.merge(store, STEPS)
        return time.perf_counter() - began

    def _delete(self) -> None:
        """Delete an earlier result, and its packs instead of recycling them."""
        with asymcheck.Store.open(self._store) as store:
            if "merged" in store.runs() and store.checkpoints("merged"):
                store.delete(STEPS[-1], run="merged")
            store.gc()
            for path in (store.path / "pool").iterdir():
                path.unlink()
        os.sync()

    def _mergekit(self) -> float:
        target = self._scratch / "mergekit"
        shutil.rmtree(target, ignore_errors=True)
        config: Any = importlib.import_module("mergekit.config")
        merge: Any = importlib.import_module("mergekit.merge")
        tasks: Any = importlib.import_module("mergekit.io.tasks")
        models = [{"model": str(folder), "parameters": {"weight": 1.0}} for folder in self._folders.values()]
        chosen = config.MergeConfiguration.model_validate(
            {"merge_method": "linear", "models": models, "dtype": "float32"}
        )
        options = merge.MergeOptions(quiet=True, copy_tokenizer=False, write_model_card=False)
        began = time.perf_counter()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            merge.run_merge(chosen, str(target), options)
        for path in files_in(target):
            fsync(path)
        seconds = time.perf_counter() - began
        # It keeps the sources mapped, and mapped files stay in the page cache.
        tasks.LoaderCache().flush_all()
        gc.collect()
        return seconds

    def _check(self) -> None:
        with asymcheck.Store.open(self._store) as store:
            state: Any = store.load(run="merged")
        for name, total in self._sum.items():
            if not torch.equal(state["model"][name], (total / len(STEPS)).float()):
                raise RuntimeError(f"tensor {name} is not the mean")

    def memory(self) -> int:
        """Return the peak memory of the command beyond that of the idle program."""
        self._delete()
        steps = ",".join(map(str, STEPS))
        return resident.of_command(["merge", self._store, "--steps", steps]).resident


def _has_mergekit() -> bool:
    return importlib.util.find_spec("mergekit") is not None


def _model(layers: int) -> dict[str, torch.Tensor]:
    """Return random weights with the names and shapes of GPT-2."""
    names = ["wte.weight", "wpe.weight", *(f"h.{layer}.{name}" for layer in range(layers) for name in _LAYER_NAMES)]
    shapes = [shape for name, shape in states.gpt2_shapes(layers).items() if name.startswith("model.")]
    if not layers:
        return {f"p{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    return {name: torch.randn(shape) for name, shape in zip([*names, "ln_f.weight", "ln_f.bias"], shapes, strict=True)}


def _write_folder(folder: Path, model: Mapping[str, torch.Tensor], layers: int) -> None:
    torch_files: Any = importlib.import_module("safetensors.torch")
    folder.mkdir()
    torch_files.save_file(dict(model), folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": 768,
        "n_head": 12,
    }
    (folder / "config.json").write_text(json.dumps(config))
