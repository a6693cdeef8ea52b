"""Train with ZeroRedundancyOptimizer under torchrun: ``zero_trainer.py STORE LAST`` prints the weights' digest."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from asymcheck import Checkpointer, Store
from asymcheck.format.digest import digest
from tests.store.equality import tensor_bytes


def main(location: str, last: int) -> None:
    """Train up to step ``last``, from the newest checkpoint if one exists."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    state = {"model": network, "optimizer": optimizer, "scheduler": scheduler}
    with Store.open(location, create=True) as store, Checkpointer(store, state, every=1, save_on_exit=True) as saver:
        restored = saver.restore()
        for step in range(restored.step + 1 if restored else 1, last + 1):
            generator = torch.Generator().manual_seed(2 * step + rank)
            model(torch.randn(8, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            saver.step(step)
    # Neither the parameters of other ranks nor the state of this rank's part are copied inside step().
    assert saver.statistics().eager_bytes == 0
    if rank == 0:
        weights = b"".join(tensor_bytes(parameter.detach()) for parameter in network.parameters())
        sys.stdout.write(f"from {restored.step if restored else 0}: {digest(weights).hex()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
