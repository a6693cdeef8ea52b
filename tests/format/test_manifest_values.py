"""Test that columns as numpy arrays equal those of Arrow, also for slices, without its slow import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymcheck.format import manifest

_TEXTS = st.lists(st.sampled_from(["", "float32", "float64", "bfloat16", "ü"]), max_size=40)
_SAVE_AND_RESTORE = """
import sys, torch, asymcheck
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
state = {"model": model, "tied": [model[0].weight], "optimizer": torch.optim.AdamW(model.parameters())}
with asymcheck.Store.open(sys.argv[1], create=True) as store:
    with asymcheck.Checkpointer(store, state, every=1, keep=None) as checkpointer:
        checkpointer.step(0)
        checkpointer.wait()
        checkpointer.restore()
    store.load()
    store.checkpoints()
print([name for name in ("pyarrow.compute", "numpy.ma") if name in sys.modules])
"""


@pytest.mark.parametrize("many", [0, 1000])
@given(texts=_TEXTS, start=st.integers(0, 5))
def test_distinct_values(many: int, texts: list[str], start: int) -> None:
    """Test that each value appears once, and that each row's number leads to its value."""
    column = pa.array(texts, type=pa.string())[start:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_COMPUTE_ROWS_MIN", many)
        values, numbers = manifest.distinct(column)
    assert len(set(values)) == len(values)
    assert [values[number] for number in numbers.tolist()] == texts[start:]


@given(values=st.lists(st.none() | st.binary(max_size=3), max_size=40), start=st.integers(0, 20))
def test_null_values(values: list[bytes | None], start: int) -> None:
    """Test slices whose validity bits begin anywhere in a byte."""
    column = pa.array(values, type=pa.binary())[start:]
    assert manifest.is_valid(column).tolist() == [value is not None for value in values[start:]]


@pytest.mark.slow
def test_a_small_state_is_saved_and_restored_without_slow_imports(tmp_path: Path) -> None:
    """Test a new process, like a resumed training."""
    command = [sys.executable, "-c", _SAVE_AND_RESTORE, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
