"""Test that a process at its limit of open files gets an error, and never an older checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from tests.damage.flips import flip
from tests.zygote import Zygote

CHILD = """
import resource, sys, warnings
from asymcheck import Store
from asymcheck.errors import TooManyFilesError

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
warnings.simplefilter("error")
with Store.open(sys.argv[1], create=True) as store:
    print([finding.kind for finding in store.verify()])
    try:
        store.load()
    except TooManyFilesError as error:
        print("ulimit -n" in str(error))
    print(store.load(3)["x"][0].item(), len(store.checkpoints()))
    store.delete(7)
    print(store.gc().freed_packs)
"""


@pytest.mark.slow
def test_a_checkpoint_in_more_packs_than_can_be_opened_is_an_error(zygote: Zygote, store_path: Path) -> None:
    """Test that the error names the remedy, and that operations with fewer files work."""
    with Store.open(store_path, create=True) as store:
        for step in range(100):
            store.save({"x": torch.full((3000,), float(step))}, step=step)
        store.save({f"g{step}": torch.full((3000,), float(step)) for step in range(100) if step != 7}, step=100)
    done = zygote.run_script(CHILD, store_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[]", "True", "3.0 101", "1"]


SEEKER = """
import resource, sys, warnings
from asymcheck import Store

warnings.simplefilter("always")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with Store.open(sys.argv[1], create=True) as store:
    print(store.load()["x"][0].item())
"""


@pytest.mark.slow
def test_a_copy_is_looked_for_in_more_packs_than_can_be_opened(zygote: Zygote, store_path: Path) -> None:
    """Test a damaged frame with another copy, and one without, which gives the older checkpoint with a warning."""
    with Store.open(store_path, create=True) as store:
        for step in range(90):
            store.save({"x": torch.full((3000,), float(step))}, step=step)
    (newest,) = (pack for pack in (store_path / "packs").glob("*.pack") if _holds(pack, 89.0))
    flip(newest, 5000 * 8)
    done = zygote.run_script(SEEKER, store_path)
    assert done.stdout == "88.0\n", done.stderr
    assert "SkippedCheckpointWarning" in done.stderr
    # The same bytes in a separate store are a second copy.
    with Store.open(store_path.with_name("other"), create=True) as other:
        other.save({"x": torch.full((3000,), 89.0)}, step=0)
    (copy,) = (store_path.with_name("other") / "packs").glob("*.pack")
    shutil.copy(copy, store_path / "packs")
    done = zygote.run_script(SEEKER, store_path)
    assert (done.stdout, done.stderr) == ("89.0\n", "")


def _holds(pack: Path, value: float) -> bool:
    return torch.full((16,), value).numpy().tobytes() in pack.read_bytes()
