"""Test folders of DeepSpeed from others. Folders that DeepSpeed wrote are in tests/integrations/."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from asymcheck.convert.deepspeed_folder import is_deepspeed_folder


@pytest.mark.parametrize("name", ["step-1", "../step-1", "..", "", "x" * 256])
def test_only_a_folder_inside_is_the_latest(tmp_path: Path, name: str) -> None:
    """Test names that lead out of the folder, and a name that is too long for a folder."""
    for folder in (tmp_path / "step-1", tmp_path / "saved" / "step-1"):
        folder.mkdir(parents=True)
        (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "saved" / "latest").write_text(f"{name}\n")
    assert is_deepspeed_folder(tmp_path / "saved") == (name == "step-1")


def test_large_latest_is_not_read(tmp_path: Path) -> None:
    """Test a sparse file."""
    (tmp_path / "latest").touch()
    os.truncate(tmp_path / "latest", 1 << 27)
    tracemalloc.start()
    try:
        assert not is_deepspeed_folder(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
