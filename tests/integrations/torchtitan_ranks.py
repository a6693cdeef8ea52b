"""Program for torchrun: the checkpoint manager of torchtitan saves to and resumes from the URI of a run."""

import copy
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtitan.components.checkpointer.dcp import CheckpointManager

from asymcheck.integrations.dcp import register
from tests.integrations.dcp_ranks import App, whole
from tests.store.equality import assert_same

# The processes of async_save import this program again.
register()
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """The optimizer with a flat state, as torchtitan's container."""

    def __init__(self, app: App) -> None:
        self._app = app

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names."""
        return get_optimizer_state_dict(self._app.model, self._app.optimizer, options=_FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state by parameter names."""
        set_optimizer_state_dict(self._app.model, self._app.optimizer, state, options=_FLAT)


class Values:
    """An object with plain values, such as a data loader with an entry for each rank."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def state_dict(self) -> dict[str, object]:
        """Return the values."""
        return self.values

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Replace the values."""
        self.values = state


def manager(folder: str, mode: str, app: App, step: int) -> CheckpointManager:
    """Return a manager with the objects of a trainer."""
    config = CheckpointManager.Config(
        enable=True, folder=folder, interval=1, async_mode=mode, keep_latest_k=2, last_save_model_only=False
    )
    return CheckpointManager(
        config,
        dataloader=Values(**{f"dp_rank_{dist.get_rank()}": f"{step}".encode(), "world_size": dist.get_world_size()}),
        model_parts=[app.model],
        optimizers=Optimizers(app),
        lr_schedulers=Values(last_epoch=step),
        states={"train_state": Values(step=torch.tensor(step), ntokens_seen=step * 100)},
        sd_adapter=None,
        base_folder="outputs",
    )


def main(mode: str, folder: str) -> None:
    """Train and save, then resume with new objects, and compare."""
    torch.set_num_threads(1)
    # Hide torch's warnings about its own functions.
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("error", module="__main__")
    dist.init_process_group("gloo")
    app = App(1)
    saving = manager(folder, mode, app, 6)
    assert not saving.load()
    for step in range(1, 7):
        app.step()
        saving.save(step, last_step=step == 6)
        saving.maybe_wait_for_staging()
    expected = copy.deepcopy(whole({"model": dict(app.model.state_dict()), "optimizer": Optimizers(app).state_dict()}))
    saving.close()
    again = App(2)
    loading = manager(folder, mode, again, 0)
    assert loading.load()
    assert_same(whole({"model": dict(again.model.state_dict()), "optimizer": Optimizers(again).state_dict()}), expected)
    assert loading.states["train_state"].values == {"step": torch.tensor(6), "ntokens_seen": 600}
    assert loading.states["dataloader"].values[f"dp_rank_{dist.get_rank()}"] == b"6"
    loading.close()
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
