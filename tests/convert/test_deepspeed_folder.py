"""Test folders of DeepSpeed from others. Folders that DeepSpeed wrote are in tests/integrations/."""

from __future__ import annotations

import argparse
import os
import tracemalloc
from pathlib import Path

import pytest
import torch

from asymcheck.convert.convert import foreign_state
from asymcheck.convert.deepspeed_folder import is_deepspeed_folder
from asymcheck.errors import ForeignFileError


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


def test_objects_in_the_client_state_do_not_concern_other_parts(tmp_path: Path) -> None:
    """Test a folder of stage 1 with the arguments of a training, with and without a selection of parts."""
    optimizer = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.ones(6)],
        "base_optimizer_state": {
            "state": {0: {"exp_avg": torch.ones(6)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
    }
    torch.save({"optimizer_state_dict": optimizer}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model = {"module": {"w": torch.ones(2, 3)}, "param_shapes": [{"w": (2, 3)}], "shared_params": {}, "global_steps": 5}
    torch.save({**model, "args": argparse.Namespace(lr=1), "epoch": 2}, tmp_path / "mp_rank_00_model_states.pt")
    with foreign_state(tmp_path, parts=["optimizer", "counters"]) as state:
        assert isinstance(state, dict)
        assert (state.keys(), state["counters"]) == ({"optimizer", "counters"}, {"global_steps": 5})
    for parts in ([], ["client_state"]):
        with (
            pytest.raises(
                ForeignFileError, match=r"the value client_state holds .* argparse\.Namespace.*; pass --part"
            ),
            foreign_state(tmp_path, parts=parts),
        ):
            pass
