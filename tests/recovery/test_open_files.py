"""A process that may open few files is told so; it is never given an older checkpoint for the newest."""

import subprocess
import sys
from pathlib import Path

import torch

from asymcheck import Store

CHILD = """
import resource, sys, warnings
from asymcheck import Store
from asymcheck.errors import TooManyFilesError

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
warnings.simplefilter("error")
with Store.open(sys.argv[1]) as store:
    print([finding.kind for finding in store.verify()])
    try:
        store.load()
    except TooManyFilesError as error:
        print("ulimit -n" in str(error))
    print(store.load(3)["x"][0].item(), len(store.checkpoints()))
    store.delete(7)
    print(store.gc().freed_packs)
"""


def test_a_checkpoint_in_more_packs_than_can_be_opened_is_an_error(store_path: Path) -> None:
    """Loading it fails by name, with the remedy; all that needs fewer files at a time works."""
    with Store.open(store_path) as store:
        for step in range(100):
            store.save({"x": torch.full((3000,), float(step))}, step=step)
        store.save({f"g{step}": torch.full((3000,), float(step)) for step in range(100) if step != 7}, step=100)
    command = [sys.executable, "-c", CHILD, str(store_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[]", "True", "3.0 101", "1"]
