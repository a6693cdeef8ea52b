"""Test random histories of a store against a model of plain lists."""

import dataclasses
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asymcheck import Store, StoreConfig
from asymcheck.errors import CheckpointNotFoundError, StepOrderWarning
from tests.property.strategies import configs
from tests.store.equality import assert_same

RUNS = ("a", "b")
LEFTOVER = f"{'e' * 32}.tmp"


@dataclasses.dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint in the model, in the order of the specification."""

    generation: int
    step: int
    number: int
    content: int = dataclasses.field(compare=False)


@dataclasses.dataclass
class Run:
    """A run in the model."""

    saved: list[Saved] = dataclasses.field(default_factory=list)
    parents: dict[int, Saved | None] = dataclasses.field(default_factory=dict)
    """Parent of each generation."""

    @property
    def generation(self) -> int:
        """Return the current generation."""
        return max(self.parents, default=1)

    def line(self) -> list[Saved]:
        """Return the line, oldest first."""
        found: list[Saved] = []
        generation, limit = self.generation, None
        while True:
            found += [one for one in self.saved if one.generation == generation and (limit is None or one <= limit)]
            limit = self.parents.get(generation)
            if limit is None:
                return sorted(found)
            generation = limit.generation

    def of_step(self, step: int) -> Saved | None:
        """Return the checkpoint that a load of a step returns."""
        candidates = [one for one in self.saved if one.step == step]
        on_line = [one for one in candidates if one in self.line()]
        return max(on_line or candidates, default=None)


def _content(number: int) -> dict[str, Any]:
    """Return states that share partitions, and have separate ones."""
    generator = torch.Generator().manual_seed(number % 3)
    return {
        "common": torch.arange(5_000, dtype=torch.int32),
        "shared by some": torch.randint(256, (20_000,), dtype=torch.uint8, generator=generator),
        "own": torch.full((700,), float(number)),
        "tiny": torch.tensor(number),
        "number": number,
    }


class StoreMachine(RuleBasedStateMachine):
    """Saves, deletes, collects, restores, closes and opens, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="asymcheck-machine-"))
        self.runs = {run: Run() for run in RUNS}
        self.number = 0

    @initialize(config=configs())
    def open(self, config: StoreConfig) -> None:
        """Create a store."""
        self.store = Store.open(self.folder / "store", config=config, create=True)

    @rule(run=st.sampled_from(RUNS), ahead=st.sampled_from([1, 1, 1, 3, 0, -1, -2]), content=st.integers(0, 5))
    def save(self, run: str, ahead: int, content: int) -> None:
        """Save the next step, a later one, the same again, or an earlier one."""
        model = self.runs[run]
        newest = max((one.step for one in model.saved if one.generation == model.generation), default=0)
        step = max(0, newest + ahead)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StepOrderWarning)
            saved = self.store.save(_content(content), step=step, run=run, metrics={"content": content})
        self.number += 1
        model.saved.append(Saved(model.generation, step, self.number, content))
        assert (saved.generation, saved.on_line, saved.complete) == (model.generation, True, True)

    @rule(run=st.sampled_from(RUNS), data=st.data())
    def save_to_an_earlier_generation(self, run: str, data: st.DataObject) -> None:
        """Save as a trainer does that another trainer has overtaken."""
        model = self.runs[run]
        generation = data.draw(st.sampled_from(sorted({1, *model.parents})))
        step, content = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 5))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StepOrderWarning)
            saved = self.store.save(_content(content), step=step, run=run, generation=generation)
        self.number += 1
        model.saved.append(Saved(generation, step, self.number, content))
        assert saved.on_line == (model.saved[-1] in model.line())

    @rule(run=st.sampled_from(RUNS), data=st.data())
    def begin_generation(self, run: str, data: st.DataObject) -> None:
        """Continue from any existing checkpoint, or from none."""
        model = self.runs[run]
        listed = self.store.checkpoints(run)
        index = data.draw(st.sampled_from([None, *range(len(listed))]))
        generation = self.store.training.begin_generation(None if index is None else listed[index], run=run)
        known = [*model.parents, *(one.generation for one in model.saved)]
        assert generation == max(known, default=0) + 1
        model.parents[generation] = None if index is None else sorted(model.saved)[index]

    @precondition(lambda self: any(model.saved for model in self.runs.values()))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete all saves of a step, or those of one generation."""
        run = data.draw(st.sampled_from([run for run in RUNS if self.runs[run].saved]))
        model = self.runs[run]
        chosen = data.draw(st.sampled_from(model.saved))
        generation = data.draw(st.sampled_from([None, chosen.generation]))
        gone = [one for one in model.saved if one.step == chosen.step and generation in (None, one.generation)]
        deleted = self.store.delete(chosen.step, run=run, generation=generation)
        assert [(one.generation, one.step) for one in deleted] == [(one.generation, one.step) for one in sorted(gone)]
        model.saved = [one for one in model.saved if one not in gone]

    @rule(leftover=st.booleans())
    def gc(self, leftover: bool) -> None:
        """Check that exactly the needed packs stay, and that a dry run announces it."""
        if leftover:
            (self.store.path / "packs" / LEFTOVER).write_bytes(b"a save that was killed")
        expected = self.store.gc(dry_run=True)
        assert self.store.gc() == expected
        assert expected.removed_temporaries == leftover
        tier = self.store.resources.tier
        live = {
            digest
            for run in RUNS
            for listing in tier.manifests.checkpoints(run)
            for name in listing.manifests
            for digest in tier.manifests.read(run, listing.ref, name).partitions()
        }
        for pack_id in tier.pack_ids():
            pack = tier.open_pack(pack_id)
            assert not live.isdisjoint(pack.digests())
            pack.close()
        assert expected.kept_packs == len(tier.pack_ids())
        assert len(list((self.store.path / "packs").iterdir())) == len(tier.pack_ids())

    @rule(config=configs(), without_catalog=st.booleans())
    def reopen(self, config: StoreConfig, without_catalog: bool) -> None:
        """Open again with other settings, and sometimes without the catalog, which is rebuilt."""
        self.store.close()
        if without_catalog:
            shutil.rmtree(self.folder / "store" / "catalog", ignore_errors=True)
        self.store = Store.open(self.folder / "store", config=config, create=True)

    @rule(run=st.sampled_from(RUNS))
    def load_newest(self, run: str) -> None:
        """Load the last checkpoint of the line, or none if the line is empty."""
        line = self.runs[run].line()
        if not line:
            with pytest.raises(CheckpointNotFoundError):
                self.store.load(run=run)
            return
        restored = self.store.restore(run=run)
        assert (restored.checkpoint.generation, restored.checkpoint.step) == (line[-1].generation, line[-1].step)
        assert_same(restored.state, _content(line[-1].content))
        assert restored.skipped == ()

    @rule(run=st.sampled_from(RUNS), step=st.integers(0, 8))
    def load_a_step(self, run: str, step: int) -> None:
        """Load the last save of a step on the line, otherwise in the newest generation that has the step."""
        expected = self.runs[run].of_step(step)
        if expected is None:
            with pytest.raises(CheckpointNotFoundError):
                self.store.load(step, run=run)
            return
        into = {"own": torch.zeros(700), "number": None}
        restored = self.store.restore(step, into=into, run=run)
        assert_same(into, {name: _content(expected.content)[name] for name in into})
        assert restored.checkpoint.generation == expected.generation
        assert restored.checkpoint.on_line == (expected in self.runs[run].line())

    @invariant()
    def the_listing_is_what_was_saved_and_not_deleted(self) -> None:
        """Check the listing: order, and the checkpoints on the line."""
        for run, model in self.runs.items():
            listed = [(one.generation, one.step, one.on_line) for one in self.store.checkpoints(run)]
            line = model.line()
            assert listed == [(one.generation, one.step, one in line) for one in sorted(model.saved)]

    def teardown(self) -> None:
        """Check every byte at the end, and load every checkpoint."""
        empty = {run for run, model in self.runs.items() if not model.saved}
        for finding in self.store.verify():
            assert finding.kind == "no-checkpoint"
            assert finding.where.removeprefix("heads/") in empty or empty == {*self.runs}
        for run, model in self.runs.items():
            for one in model.saved:
                if model.of_step(one.step) == one:
                    assert_same(self.store.load(one.step, run=run), _content(one.content))
        self.store.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 4,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStore = pytest.mark.slow(StoreMachine.TestCase)
