"""Train on a GPU with a checkpoint at every step; write each loss to a file. Arguments: store, losses, steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch

import asymcheck


def main(location: Path, losses: Path, steps: int) -> None:
    """Resume if the store has a checkpoint. All operations are deterministic, also dropout, by its generator."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Dropout(0.2), torch.nn.Linear(2048, 512)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    scaler = torch.amp.GradScaler("cuda")
    average = torch.optim.swa_utils.AveragedModel(model)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "average": average,
        "rng": asymcheck.RngState(),
    }
    with (
        asymcheck.Store.open(location, create=True) as store,
        asymcheck.Checkpointer(store, state, every=1) as checkpointer,
        losses.open("a") as file,
    ):
        restored = checkpointer.restore()
        for step in range(0 if restored is None else restored.step + 1, steps):
            batch = torch.randn(64, 512, device="cuda")
            with torch.autocast("cuda", torch.float16):
                loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(model)
            checkpointer.step(step)
            file.write(f"{step} {loss.item().hex()}\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
