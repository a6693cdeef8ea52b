"""``publish``: bytes, latency and pause of releases of weights, while a GPT-2 is fine-tuned.

A GPT-2 in float32 is fine-tuned with AdamW on text of Python's standard library, after some steps with a larger
learning rate. After every 10 steps, its weights are published in bfloat16: as small as possible, which is the default,
and with ``compression="auto"``. The *file* way casts the weights, writes them with torch.save, copies the file to the
folder of the consumer, syncs both files, and loads the copy into a model. Tied weights are cast and written once. Each
way ends when the model of the consumer has the new weights. All ways are measured after the same steps, and each step
starts with a different way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import asymcheck
from asymcheck.config import Compression
from asymcheck.publish.release import Release
from benchmarks import environment
from benchmarks.peers import fsync
from benchmarks.report import Report, Row, rotated, row

RATES = (1e-5, 1e-6)
STEPS = 10
"""Training steps between two releases."""
_WARM_UP_RATE = 1e-4
_BATCH = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Model and number of releases."""

    config: GPT2Config
    context: int
    warm_up: int
    """Training steps before the first release."""
    releases: int
    """Releases per learning rate, without the first full one."""
    pauses: int
    """Updates of which the pause is measured."""


FULL = Plan(GPT2Config(), 32, 10, 3, 8)
QUICK = Plan(
    GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0),
    *(32, 5, 2, 4),
)


def run(folder: Path | None, *, quick: bool, plan: Plan | None = None) -> Report:
    """Measure in a temporary folder inside ``folder``."""
    # The configuration names no loss, which is no mistake.
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        measured = _Publication(plan or (QUICK if quick else FULL), Path(scratch))
        with contextlib.closing(measured):
            results, ratios = measured.measure()
        described = environment.describe(Path(scratch))
    described["state"] = f"GPT-2, {measured.parameters / 1e6:.1f} million parameters, published in bfloat16"
    return Report("publish", described, results, ratios)


SMALLEST, AUTO, FILE = "asymcheck", "asymcheck auto", "file"


class _Way:
    """A publisher, and a consumer that follows it without a delay."""

    def __init__(self, plan: Plan, location: Path, compression: Compression) -> None:
        self.served = GPT2LMHeadModel(plan.config).bfloat16()
        self.publisher = asymcheck.Publisher(
            asymcheck.Publish(str(location), dtype=torch.bfloat16, compression=compression)
        )
        self.subscriber = asymcheck.Subscriber(str(location), self.served)
        self.takes: list[float] = []

    def publish(self, model: GPT2LMHeadModel, step: int) -> tuple[float, Release]:
        """Publish and follow; return the seconds until the weights are visible."""
        began = time.perf_counter()
        copies = self.publisher.take({"model": model})
        self.takes.append(time.perf_counter() - began)
        release = self.publisher.commit(copies, step)
        self.subscriber.update()
        return time.perf_counter() - began, release

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()


class _Publication:
    """A training with a publisher and a consumer for each way, in one process."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        torch.manual_seed(0)
        self._plan, self._scratch = plan, scratch
        self._model = GPT2LMHeadModel(plan.config)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_WARM_UP_RATE)
        self._text = _words(plan.config.vocab_size)
        self._loaded = GPT2LMHeadModel(plan.config).bfloat16()
        self._step = self._round = 0
        self._ways = {
            SMALLEST: _Way(plan, scratch / "releases", "smallest"),
            AUTO: _Way(plan, scratch / "auto", "auto"),
        }

    def close(self) -> None:
        for way in self._ways.values():
            way.close()

    def measure(self) -> tuple[list[Row], dict[str, float]]:
        """Return rows and ratios."""
        self._train(self._plan.warm_up, _WARM_UP_RATE)
        bytes_of: dict[float, list[int]] = {rate: [] for rate in RATES}
        seconds: dict[str, list[float]] = {SMALLEST: [], AUTO: [], FILE: [], "load": []}
        full = self._publish({})[SMALLEST].state_bytes
        for rate in RATES:
            # The first release after a change of the rate still has the momentum of the earlier rate.
            self._train(STEPS, rate)
            self._publish({})
            while len(bytes_of[rate]) < self._plan.releases:
                self._train(STEPS, rate)
                times: dict[str, float] = {}
                release = self._publish(times)[SMALLEST]
                if release.deltas:
                    bytes_of[rate].append(release.written_bytes)
                    for name, value in times.items():
                        seconds[name].append(value)
        pauses = self._pauses()
        pause = float(np.quantile(pauses, 0.95))
        results = [
            row(SMALLEST, f"bytes of a release, learning rate {rate:g}", "bytes", values)
            for rate, values in bytes_of.items()
        ]
        results += [
            row(FILE, "bytes", "bytes", [full]),
            row(SMALLEST, "training waits for the copy", "s", self._ways[SMALLEST].takes),
            *(row(name, "publish to visible", "s", seconds[name]) for name in (SMALLEST, AUTO, FILE)),
            row(FILE, "load", "s", seconds["load"]),
            row(SMALLEST, "pause of the consumer", "s", pauses),
        ]
        ratios = {
            f"full_bytes/release_bytes_{_exponent(rate)}": full / statistics.median(values)
            for rate, values in bytes_of.items()
        }
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ratios["file_latency/publish_latency"] = medians[FILE] / medians[SMALLEST]
        ratios["file_latency/publish_latency_auto"] = medians[FILE] / medians[AUTO]
        ratios["pause_p95/file_load"] = pause / medians["load"]
        return results, ratios

    def _train(self, steps: int, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for _ in range(steps):
            starts = torch.randint(len(self._text) - self._plan.context, (_BATCH,)).tolist()
            tokens = torch.stack([self._text[start : start + self._plan.context] for start in starts])
            self._model(tokens, labels=tokens).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1

    def _publish(self, times: dict[str, float]) -> dict[str, Release]:
        """Publish in all ways, in turns; return the releases. ``times`` receives the seconds."""
        releases: dict[str, Release] = {}
        for name, way in rotated([*self._ways.items(), (FILE, None)], self._round):
            os.sync()
            if way is None:
                times[FILE], times["load"] = self._by_file()
            else:
                times[name], releases[name] = way.publish(self._model, self._step)
                self._check(way)
        self._round += 1
        return releases

    def _by_file(self) -> tuple[float, float]:
        """Return the seconds until the weights are visible by way of a file, and those of the load."""
        written, copied = self._scratch / "written.pt", self._scratch / "copied.pt"
        began = time.perf_counter()
        state = self._model.state_dict()
        cast = {tensor.data_ptr(): tensor.bfloat16() for tensor in state.values()}
        torch.save({name: cast[tensor.data_ptr()] for name, tensor in state.items()}, written)
        fsync(written)
        shutil.copyfile(written, copied)
        fsync(copied)
        loading = time.perf_counter()
        self._loaded.load_state_dict(torch.load(copied, weights_only=True))
        ended = time.perf_counter()
        return ended - began, ended - loading

    def _pauses(self) -> list[float]:
        """Return the seconds in update() when a thread has fetched the release."""
        pauses = []
        way = self._ways[SMALLEST]
        with asymcheck.Subscriber(way.publisher.rules.location, way.served, prefetch=True, poll_s=0.02) as subscriber:
            for _ in range(self._plan.pauses):
                subscriber.wait(60)
                began = time.perf_counter()
                subscriber.update()
                pauses.append(time.perf_counter() - began)
                self._check(way)
                self._train(1, RATES[0])
                way.publisher.publish({"model": self._model}, self._step)
        return pauses

    def _check(self, way: _Way) -> None:
        """Raise RuntimeError unless the consumer has the weights of the training."""
        pairs = zip(self._model.parameters(), way.served.parameters(), strict=True)
        if not all(torch.equal(ours.bfloat16(), theirs) for ours, theirs in pairs):
            raise RuntimeError("the consumer has other weights than the training")


def _words(vocabulary: int) -> torch.Tensor:
    """Return the words of Python's standard library as tokens: their checksums, so that no vocabulary is needed."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b" ".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:100])
    return torch.tensor([zlib.crc32(word) % vocabulary for word in text.split()])


def _exponent(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")
