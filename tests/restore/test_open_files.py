"""Test reads of a checkpoint in more packs than the process may have open, which never give an older checkpoint."""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from asymcheck import Store, StoreConfig
from asymcheck.errors import LockTimeoutError
from asymcheck.format.digest import digest
from asymcheck.restore.frame_reader import read_any
from asymcheck.restore.resolve import Resolved, resolve_one
from tests.damage.flips import flip
from tests.zygote import Zygote

CHILD = """
import resource, sys, warnings
from asymcheck import Store

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
warnings.simplefilter("error")
with Store.open(sys.argv[1], create=True) as store:
    print([finding.kind for finding in store.verify()])
    print([value[0].item() for value in store.load().values()] == [step for step in range(100) if step != 7])
    print(store.load(3)["x"][0].item(), len(store.checkpoints()))
    store.delete(7)
    print(store.gc().freed_packs)
"""


@pytest.mark.slow
def test_a_checkpoint_in_more_packs_than_can_be_opened_is_restored(zygote: Zygote, store_path: Path) -> None:
    """Test a restore, and operations with fewer files."""
    with Store.open(store_path, create=True) as store:
        for step in range(100):
            store.save({"x": torch.full((3000,), float(step))}, step=step)
        store.save({f"g{step}": torch.full((3000,), float(step)) for step in range(100) if step != 7}, step=100)
    done = zygote.run_script(CHILD, store_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[]", "True", "3.0 101", "1"]


@contextlib.contextmanager
def opened_with_too_many_packs(
    path: Path, monkeypatch: pytest.MonkeyPatch, config: StoreConfig
) -> Iterator[tuple[Store, Resolved]]:
    """Open a store whose last checkpoint is in more packs than may be open, with the sources of this checkpoint."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, limits[1]))
    with Store.open(path, config=config, create=True) as store:
        kept = {f"x{step}": torch.full((3000,), float(step)) for step in range(12)}
        for step in range(12):
            store.save({"x": kept[f"x{step}"], "garbage": torch.full((9000,), -float(step))}, step=step)
        store.save(kept, step=12)
        tier = store.resources.nvme
        resolved = resolve_one(tier, tier.manifests.checkpoints("default")[-1])
        with resolved.sources:
            yield store, resolved


def test_a_pack_may_be_repacked_while_its_file_is_closed(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a read of more packs than may be open, between whose reads a collection moves their partitions."""
    with opened_with_too_many_packs(store_path, monkeypatch, StoreConfig(slots=1)) as (store, resolved):
        for step in range(12):
            store.delete(step)
        # The packs with an open file are locked, at most four.
        assert store.gc().repacked_packs >= 8
        for name in resolved.manifests[0].partitions():
            assert digest(read_any(resolved.sources, name)) == name


def test_a_pack_that_is_locked_while_its_file_is_closed_is_not_damaged(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a read of more packs than may be open, some of which another process has locked since."""
    config = StoreConfig(slots=1, read_lock_timeout_s=0.05)
    with (
        opened_with_too_many_packs(store_path, monkeypatch, config) as (store, resolved),
        contextlib.ExitStack() as stack,
    ):
        locked = store.resources.nvme.locked
        held = [stack.enter_context(locked(pack)) for pack in (store_path / "packs").iterdir()]
        assert sum(held) >= 8
        with pytest.raises(LockTimeoutError, match="was locked"):
            list(map(partial(read_any, resolved.sources), resolved.manifests[0].partitions()))


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
