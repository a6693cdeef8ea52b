"""Test FSDP2: saved by four ranks, restored by four, by two of torchrun, and by one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asymcheck import Store
from asymcheck.format.digest import digest
from tests.reshard import trainer
from tests.store.equality import tensor_bytes
from tests.zygote import Zygote

ROOT = Path(__file__).resolve().parents[2]


def _run(ranks: int, action: str, store: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # Use one thread each, and do not wait for a missing network.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "reshard" / "trainer.py"), action, str(store), str(out)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports: dict[str, Any] = json.loads(out.read_text())
    return reports


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a store, and the results of the four saving ranks and of four restoring ranks."""
    folder = tmp_path_factory.mktemp("saved")
    words = ["save", folder / "store", folder / "out.json"]
    zygote.run_ranks(4, "tests.reshard.trainer", words, folder)
    return folder / "store", json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def saved(trained: tuple[Path, dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Return a store, and the results of the saving training after the save."""
    return trained[0], trained[1]["save"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [4, 2])
def test_resumed_training_is_identical(trained: tuple[Path, dict[str, Any]], tmp_path: Path, ranks: int) -> None:
    """Test that all tensors and the next losses are equal, for any mesh."""
    store, reports = trained
    found = reports["restore"] if ranks == 4 else _run(ranks, "restore", store, tmp_path / "out.json")["restore"]
    assert found == reports["save"]


@pytest.mark.slow
def test_one_process_goes_on_with_plain_tensors(saved: tuple[Path, dict[str, Any]]) -> None:
    """Test a model without distributed tensors."""
    location, expected = saved
    with Store.open(location, create=True) as store:
        for step, kind in enumerate(("fully_sharded", "in_two_dimensions")):
            model = trainer.build(seed=99)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            if kind == "in_two_dimensions":
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            store.load(step, into={"model": model, "optimizer": optimizer})
            assert trainer.digests(model, optimizer) == expected[kind]["tensors"]
            losses = trainer.train(model, optimizer, trainer.STEPS, 2)
            if kind == "fully_sharded":
                assert losses == expected[kind]["losses"]
            found, right = (
                torch.tensor([float.fromhex(one) for one in some]) for some in (losses, expected[kind]["losses"])
            )
            assert torch.allclose(found, right)


def test_a_merged_state_has_whole_tensors(saved: tuple[Path, dict[str, Any]]) -> None:
    """Test a load without a model."""
    location, expected = saved
    with Store.open(location, create=True) as store:
        state = store.load(0)
        assert isinstance(state, dict)
        for name, value in state["model"].items():
            assert digest(tensor_bytes(value)).hex() == expected["fully_sharded"]["tensors"][f"{name} "]
