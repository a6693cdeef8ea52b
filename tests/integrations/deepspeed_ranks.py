"""Ranks with DeepSpeed engines, run as a program with one process per rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from asymcheck import CaptureConfig, Checkpointer, RngState, Store
from asymcheck.capture.engine import CaptureEngine
from asymcheck.capture.optimizer_fence import OptimizerOwnership
from asymcheck.config import StoreConfig
from asymcheck.errors import AsymcheckError
from asymcheck.integrations.deepspeed import EngineState
from asymcheck.state.walk import flatten
from tests.distributed.training import digest_of
from tests.integrations.deepspeed_configs import COMPARED, CONFIGS, EVERY, KILLED_IN, MICRO_STEPS, STEPS

# DeepSpeed requires fast fp16 kernels of the CPU. torch computes in fp16 without them, too.
get_accelerator().is_fp16_supported = lambda: True
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(nn.Module):
    """Layers of sizes that no number of ranks divides; two share a weight, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(7, 13), nn.Dropout(0.2)
        self.second, self.third = nn.Linear(13, 13), nn.Linear(13, 13)
        self.third.weight = self.second.weight
        self.last = nn.Linear(13, 5).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the forward pass, and count it."""
        self.seen += 1
        return self.last(self.third(self.second(self.drop(self.first(inputs).relu())).relu()))


class Part(EngineState):
    """Checks the state that it is given."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that no rank gets more than its own part."""
        for name, moments in state_dict["optimizer"].items():
            own = state_dict["weights"][name].local.numel()
            assert {getattr(one, "local", one).numel() for one in moments.values()} <= {own}
        super().load_state_dict(state_dict)


class App:
    """An engine in training."""

    def __init__(self, name: str, folder: Path, run: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = Model()
        trained = [one for one in model.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.ndim == 1], "weight_decay": 0.0},
        ]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO_STEPS,
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            **CONFIGS[name],
        }
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.part = Part(self.engine)
        self.state: dict[str, object] = {"engine": self.part, "rng": RngState()}
        capture = CaptureConfig(proof="full", ring_folder=str(folder / "memory"))
        # Capture small tensors in partitions, not in the manifest.
        small = StoreConfig(bundle_below_bytes=4096, inline_bytes=16, inline_total_bytes=32)
        self.store = Store.open(folder / "store", config=small, create=True)
        self.checkpointer = Checkpointer(self.store, self.state, every=EVERY, run=run, capture=capture, keep=None)

    def train(self, *, killed: bool = False) -> float:
        """Train one step; each rank has different random numbers."""
        engine = self.engine
        torch.manual_seed(1000 * engine.global_steps + RANK)
        losses = []
        for _ in range(MICRO_STEPS):
            inputs = torch.randn(4, 7).to(next(engine.module.parameters()).dtype)
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            losses.append(loss.item())
        self.checkpointer.step(engine.global_steps)
        return sum(losses)

    def micro_step(self) -> int:
        """Run half a step; return the number of the next one."""
        self.engine.backward(self.engine(torch.randn(4, 7, dtype=torch.bfloat16)).float().mean())
        self.engine.step()
        return int(self.engine.global_steps) + 1

    def digest(self) -> str:
        """Return a digest of all whole tensors, which is equal on all ranks and for any number of ranks."""
        module, found = self.engine.module, []
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            found += [one.detach().clone().view(torch.uint8) for one in module.parameters()]
        mend_links(self.engine.optimizer)
        for one in module.parameters():
            if one.requires_grad:
                found.append(safe_get_full_fp32_param(one))
                found += [safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")]
        engine = self.engine
        counters = [
            engine.global_steps,
            engine.skipped_steps,
            *engine.get_lr(),
            engine.lr_scheduler.last_batch_iteration,
        ]
        state = engine.optimizer.optimizer.state
        counters += [float(one["step"]) for one in state.values()][:1]
        return digest_of([*found, *module.buffers(), torch.tensor(counters)])


def mend_links(optimizer: Any) -> None:  # noqa: ANN401 - one of DeepSpeed's
    """Make DeepSpeed link parameters to the fp32 weights by position, and to the state of all groups.

    DeepSpeed itself does the former only for padded parameters, and the latter only for the first group.
    """
    if hasattr(optimizer, "round_robin_bit16_padding"):
        paddings = optimizer.round_robin_bit16_padding
        optimizer.round_robin_bit16_padding = [[1] * len(group) for group in paddings]
        optimizer._link_all_hp_params()
        optimizer.round_robin_bit16_padding = paddings
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def whole(folder: Path) -> dict[str, object]:
    """Train without a kill, with copies as late as possible; finally save with DeepSpeed."""
    release = CaptureEngine._release
    CaptureEngine._release = lambda self, window: window is None and release(self, None)  # type: ignore[method-assign]  # the fence is what the test is about
    reports: dict[str, object] = {}
    for name in CONFIGS:
        app = App(name, folder, name)
        app.checkpointer.restore()
        losses, digests = [], {}
        for step in range(1, STEPS + 1):
            losses.append(app.train())
            if step in (COMPARED, STEPS):
                digests[step] = app.digest()
        app.checkpointer.close()
        flat = flatten(app.state)
        rows = OptimizerOwnership().deferred_rows(flat, [], [app.part])
        deferred = [leaf.name for leaf, is_deferred in zip(flat.leaves, rows, strict=True) if is_deferred]
        eager = [leaf.name for leaf in flat.leaves if leaf.nbytes and leaf.name not in deferred]
        skipped = app.engine.skipped_steps
        reports[name] = {"losses": losses, "digests": digests, "skipped": skipped, "deferred": deferred, "eager": eager}
        app.engine.save_checkpoint(folder / "saved" / name, client_state={"epoch": 3, "files": ["a", "b"]})
        # DeepSpeed's own program does not support the files of its second optimizer of stage 1.
        if RANK == 0 and name != "one-sums":
            weights = get_fp32_state_dict_from_zero_checkpoint(folder / "saved" / name)
            torch.save(dict(weights), folder / f"{name}.pt")
        dist.barrier()
    return reports


def killed(folder: Path) -> dict[str, object]:
    """Train all engines in turn, until rank 1 kills itself between backward and step."""
    apps = [App(name, folder, name) for name in CONFIGS]
    for app in apps:
        app.checkpointer.restore()
    for step in range(1, STEPS + 1):
        for app in apps:
            app.train(killed=step == KILLED_IN and RANK == 1)
    return {}


def resumed(folder: Path) -> dict[str, object]:
    """Restore other engines, and train to the end."""
    reports: dict[str, object] = {}
    for name in CONFIGS:
        app = App(name, folder, name, seed=1)
        restored = app.checkpointer.restore()
        assert restored is not None
        losses = [app.train() for _ in range(restored.step, STEPS)]
        digest = app.digest()
        # Restore an older step in place.
        app.checkpointer.restore(EVERY)
        again = [app.train() for _ in range(EVERY, STEPS)]
        reports[name] = {"restored": restored.step, "losses": losses, "digest": digest, "again": [again, app.digest()]}
        app.checkpointer.close()
    return reports


def others(folder: Path) -> dict[str, object]:
    """Restore on another number of ranks, and in another stage."""
    reports: dict[str, object] = {}
    for name, run in (*zip(CONFIGS, CONFIGS, strict=True), ("three", "one"), ("one", "three")):
        app = App(name, folder, run, seed=1)
        restored = app.checkpointer.restore(COMPARED)
        assert restored is not None
        reports[f"{run} into {name}"] = app.digest()
        app.train()
    return reports


def refused(folder: Path) -> dict[str, object]:
    """Try engines without ZeRO, and engines of another model."""
    reports: dict[str, object] = {}
    app = App("one", folder, "one")
    app.store.save({"engine": nn.Linear(2, 2)}, step=0, run="plain")
    attempts = {
        "stage 0": lambda: EngineState(deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 4})[0]),
        "no engine": lambda: EngineState(nn.Linear(2, 2)),
        "no checkpoint of an engine": lambda: app.store.load(into={"engine": app.part}, run="plain"),
        "between steps": lambda: app.checkpointer.save(app.micro_step()),
        "another model": lambda: app.store.load(into={"engine": Other(app.engine)}, run="one"),
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except AsymcheckError as error:
            reports[what] = f"{type(error).__name__}: {error}"
    return reports


class Other(EngineState):
    """An engine that trains something else."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def misfits(self, stored: Any) -> Any:  # noqa: ANN401 - as in the base
        """Compare with a checkpoint of a larger model."""
        shapes = {**stored["shapes"], "first.weight": torch.Size([14, 7]), "fourth.bias": torch.Size([2])}
        return super().misfits({**stored, "shapes": shapes, "groups": []})


SCENARIOS = {one.__name__: one for one in (whole, killed, resumed, others, refused)}


def main() -> None:
    """Run the scenarios of the command line, separated by commas."""
    torch.set_num_threads(1)
    # Otherwise, DeepSpeed first compiles an operator for ranks of one machine.
    deepspeed.ops.__compatible_ops__ = {}
    scenarios, folder = sys.argv[1].split(","), Path(sys.argv[2])
    (folder / "memory").mkdir(exist_ok=True)
    meeting = dist.TCPStore("127.0.0.1", int(os.environ["MEETING"]), None, is_master=False, wait_for_workers=False)
    launch = f"{folder}/{sys.argv[1]}/{WORLD}"
    dist.init_process_group("gloo", store=dist.PrefixStore(launch, meeting), rank=RANK, world_size=WORLD)
    os.environ["LOCAL_RANK"] = str(RANK)
    deepspeed.init_distributed("gloo", verbose=False)
    reports = {name: SCENARIOS[name](folder) for name in scenarios}
    path = folder / f"report-{RANK}.json"
    path.with_suffix(".tmp").write_text(json.dumps(reports))
    path.with_suffix(".tmp").rename(path)
    dist.barrier()
    # Skip the interpreter's shutdown: threads of gloo sometimes abort the process during it.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
