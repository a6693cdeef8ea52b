"""Test that ``asymcheck diff`` shows changes between two checkpoints."""

from __future__ import annotations

import enum
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from asymcheck import Store
from asymcheck.types import PackId, Part
from tests.cli.conftest import Outcome

Call = Callable[..., Outcome]


class Level(enum.Enum):
    """Two numbers with names."""

    LOW = 1
    HIGH = 2


def rows(outcome: Outcome, name: str) -> list[list[str]]:
    """Return the cells of the table rows that begin with a name."""
    return [line.split() for line in outcome.out.splitlines() if line.split()[:1] == [name]]


def test_changes_and_norms(call: Call, store: Path) -> None:
    """Test a row for the change and a row for the norms, sums above, and status 0 for different states."""
    outcome = call("diff", store, 10, 20)
    assert (outcome.status, outcome.err) == (0, "")
    change, norms = rows(outcome, "optimizer.0.exp_avg")
    assert change == ["optimizer.0.exp_avg", "value", "float32", "3000", "11.7", "KiB", "0", "B"]
    assert norms == ["optimizer.0.exp_avg", "547.7", "547.7", "1", "10", "3000"]
    assert "tensors: 1 changed in value, 1 unchanged (39.1 KiB)\n" in outcome.out
    assert "values: 0 changed, 1 unchanged\n" in outcome.out
    assert "bytes: 50.8 KiB in A, 50.8 KiB in B, 39.1 KiB shared (77% of B)\n" in outcome.out


def test_the_sums_come_before_the_tables(call: Call, store: Path) -> None:
    """Test the order for tables of hundreds of rows."""
    lines = [line.split() for line in call("diff", store, 10, 20).out.splitlines() if line.strip()]
    assert [line[0] for line in lines[:6]] == ["A", "B", "tensors:", "values:", "bytes:", "tensor"]


def test_equal_checkpoints(call: Call, store: Path) -> None:
    """Test the sums without a table."""
    outcome = call("diff", store, 20, 20)
    assert outcome.status == 0
    assert "tensors: 2 unchanged (50.8 KiB)\n" in outcome.out
    assert len(outcome.out.splitlines()) == 5


def test_values_and_runs(call: Call, store: Path) -> None:
    """Test a plain value that only A has, and a checkpoint of another run by its name."""
    assert rows(call("diff", store, 20, 25), "lr") == [["lr", "0.1", "(none)"]]
    assert "A  default  step 20" in call("diff", store, 20, "other@1").out
    assert "B  other  step 1 " in call("diff", store, 20, "other@1").out


def test_only_some_tensors_without_reading(call: Call, store: Path) -> None:
    """Test a glob, and --no-norms, which needs no pack."""
    for pack in (store / "packs").iterdir():
        pack.unlink()
    outcome = call("diff", store, 10, 20, "--no-norms", "--tensors", "opt*")
    assert outcome.status == 0
    assert len(rows(outcome, "optimizer.0.exp_avg")) == 1
    assert "tensors: 1 changed in value, 0 unchanged (0 B)" in outcome.out


def test_a_step_that_was_saved_twice_says_so(call: Call, store: Path) -> None:
    """Test that the output shows the other save id, which diff accepts."""
    import asymcheck

    with asymcheck.Store.open(store, create=True) as opened:
        opened.save({"model": {"weight": 1}}, step=30)
        old = next(item.save_id for item in opened.checkpoints() if item.step == 30 and item.generation == 1)
    assert f"step 30 was saved 2 times, also as save:{old[:12]}\n" in call("diff", store, 10, 30).out
    assert f"save {old[:12]}" in call("diff", store, 10, f"save:{old[:12]}").out
    outcome = call("diff", store, 10, f"save:{old[:1]}")
    assert outcome.status == 2
    assert "give more digits:\n  step 10: save:" in outcome.err


def test_damage_while_reading(call: Call, store: Path) -> None:
    """Test status 4 with frame, pack and tensor."""
    import asymcheck

    with asymcheck.Store.open(store, read_only=True) as opened:
        changed = {part.digest for part in opened.tensors(20, "optimizer.*")[1][0].partitions}
        (tensor,) = opened.tensors(10, "optimizer.*")[1]
        place = next(part for part in tensor.partitions if part.digest not in changed)
        assert place.pack is not None
        pack = opened.resources.tier.open_pack(PackId(bytes.fromhex(place.pack)))
        start = int(pack.entries["offset"][place.frame])
        pack.close()
    path = store / "packs" / f"{place.pack}.pack"
    data = bytearray(path.read_bytes())
    data[start + 4096 - 100 : start + 4096 + 100] = bytes(200)
    path.write_bytes(data)
    outcome = call("diff", store, 10, 20)
    assert outcome.status == 4
    assert f"pack {place.pack}" in outcome.err
    assert "needed by tensor optimizer.0.exp_avg" in outcome.err


def test_several_ranks(call: Call, store_path: Path) -> None:
    """Test that both tables have a column for the rank, because tensor names are equal."""
    with Store.open(store_path, create=True) as opened:
        for step in (1, 2):
            save_id = f"{time.time_ns():016x}{step:016x}"
            for rank in range(2):
                state = {"w": torch.full((1000,), float(step * (rank + 1)))}
                opened.save(state, step=step, part=Part(rank, 2, save_id))
    lines = [line.split() for line in call("diff", store_path, 1, 2).out.splitlines()]
    tables = [number for number, words in enumerate(lines) if words[:2] == ["rank", "tensor"]]
    assert [lines[number][2] for number in tables] == ["change", "|A|"]
    for number in tables:
        assert [words[:2] for words in lines[number + 2 : number + 4]] == [["0", "w"], ["1", "w"]]


def test_a_change_on_the_first_rank_only(call: Call, store_path: Path) -> None:
    """Test that the rank is shown, because replicas that differ are suspect."""
    with Store.open(store_path, create=True) as opened:
        for step in (1, 2):
            for rank in range(2):
                state = {"w": torch.full((1000,), float(step if rank == 0 else 1))}
                opened.save(state, step=step, part=Part(rank, 2, f"{step:032x}"))
    found = [line.split() for line in call("diff", store_path, 1, 2).out.splitlines()]
    assert [words[:2] for words in found if "w" in words] == [["0", "w"]] * 2


def test_changed_typed_values_are_named(call: Call, store_path: Path) -> None:
    """Test that the diff shows counts, windows and members by name, with readable texts."""
    with Store.open(store_path, create=True) as opened:
        for step in (1, 2):
            value = {"counts": defaultdict(int, a=step), "seen": {step}, "level": Level(step)}
            opened.save(value, step=step)
    outcome = call("diff", store_path, 1, 2)
    assert rows(outcome, "counts.a") == [["counts.a", "1", "2"]]
    assert rows(outcome, "seen") == [["seen", "set(1)", "set(2)"]]
    assert rows(outcome, "level") == [["level", "Level.LOW", "(1)", "Level.HIGH", "(2)"]]
    assert "Level.HIGH (2)" in call("inspect", store_path, "--values").out
