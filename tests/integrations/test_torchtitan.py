"""Test the checkpoint manager of torchtitan with the URI of a run as its folder."""

from pathlib import Path

import pytest

from asymcheck import Store
from tests.zygote import Zygote

pytest.importorskip("torchtitan.components.checkpointer.dcp", reason="torchtitan 0.3 is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan_resumes_from_a_uri(zygote: Zygote, tmp_path: Path, mode: str) -> None:
    """Test saves, the search for the newest step, and the deletion of old checkpoints, on two ranks."""
    folder = f"asymcheck://{tmp_path}/store?run=titan"
    zygote.run_ranks(2, "tests.integrations.torchtitan_ranks", [mode, folder], tmp_path)
    with Store.open(tmp_path / "store") as store:
        checkpoints = store.checkpoints("titan")
        assert [one.step for one in checkpoints if one.complete][-2:] == [5, 6]
        # At the last deletions, the newest step may not have been complete, and the last save deletes nothing.
        assert len(checkpoints) <= 4
        assert store.verify() == []
