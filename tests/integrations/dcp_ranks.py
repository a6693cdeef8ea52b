"""Program for torchrun: ranks with an FSDP2 model save and load with torch's DCP."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asymcheck import Store
from asymcheck.integrations.dcp import AsymcheckReader, AsymcheckWriter


class App:
    """Model and optimizer, as in the examples of DCP."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        # 7 and 13 rows, which no number of ranks divides.
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 13), torch.nn.ReLU(), torch.nn.Linear(13, 7))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)

    def step(self) -> None:
        """Train one step, so that the optimizer has a state."""
        for _ in range(3):
            self.model(torch.ones(2, 5)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return both states, with names that do not depend on the ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both states."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(value: object) -> object:
    """Return a state with whole tensors, on all ranks."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return type(value)(whole(item) for item in value) if isinstance(value, (list, tuple)) else value


def main(what: str, folder: Path) -> None:
    """Save, or load and compare with the saved state."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Hide torch's warnings about its own functions.
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo")
    app = App(1 if what == "save" else 2)
    extra = {"step": 3, "note": "one", "betas": [0.9, 0.95], "same": torch.arange(4.0)}
    with Store.open(folder / "store", create=True) as store:
        if what == "save":
            app.step()
            state = {"app": app, "extra": extra}
            dcp.save(state, storage_writer=AsymcheckWriter(store, step=3, metrics={"loss": 1.5}))
            app.step()
            dcp.async_save(state, storage_writer=AsymcheckWriter(store, step=6)).result()
            dcp.save(state, checkpoint_id=folder / "folder")
        else:
            app.step()
            state = {"app": app, "extra": {"step": 0, "note": "", "betas": [], "same": torch.zeros(4)}}
            dcp.load(state, storage_reader=AsymcheckReader(store))
    everything = whole({"app": app.state_dict(), "extra": state["extra"]})
    if dist.get_rank() == 0:
        torch.save(everything, folder / f"{what}-{dist.get_world_size()}.pt")
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
