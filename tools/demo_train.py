"""Run one training process of the demo: a GPT-2 on real text, with or without checkpoints.

The parent (``tools.demo``) starts it, may kill it with SIGKILL in the middle of a save, and starts it again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import xxhash
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import asymcheck
from asymcheck.events import Event, observe
from asymcheck.state.walk import flatten

CONTEXT = 128
BATCH = 8
TEXT_BYTES = 4_000_000


def read_text() -> torch.Tensor:
    """Return the source code of Python's standard library as bytes, which serve as tokens."""
    data = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        data += path.read_bytes()
        if len(data) > TEXT_BYTES:
            break
    return torch.frombuffer(data, dtype=torch.uint8)


def draw_batch(text: torch.Tensor) -> torch.Tensor:
    """Draw a batch with torch's global generator, whose state is part of the checkpoint."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH,))
    return torch.stack([text[start : start + CONTEXT] for start in starts.tolist()]).long()


def state_digest(state: dict[str, object]) -> str:
    """Return one digest over every byte and every plain value of a state."""
    flat = flatten(state)
    hasher = xxhash.xxh3_128(json.dumps(flat.tree).encode())
    for leaf in flat.leaves:
        data = bytearray(leaf.nbytes)
        if data:
            leaf.copy_bytes(0, memoryview(data))
        hasher.update(bytes(data))
    return str(hasher.hexdigest())


def report(line: str) -> None:
    """Report to the parent. Two threads report, and print() would write the end of the line separately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class PauseInSave:
    """Stops a chosen save half-way, reports it to the parent, and waits to be killed.

    Training continues meanwhile. The class also reports when the same state is complete in memory.
    """

    def __init__(self, name: str, wanted: int) -> None:
        """Pause at the event ``name`` of the save of step ``wanted``."""
        self.name, self.wanted, self.step = name, wanted, -1
        self._complete, self._paused = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        """Handle an event of the save in progress, on any thread."""
        if self.step != self.wanted:
            return
        if event.name == "capture.complete":
            self._complete.set()
        elif event.name == self.name and not self._paused.is_set():
            self._paused.set()
            self._complete.wait()
            report(f"paused {event.name}")
            time.sleep(600)


def train(arguments: argparse.Namespace) -> None:
    """Train, log the loss and the digest of the state of every step, and report the digest of the final state."""
    # Seed all generators that RngState saves. Otherwise, unused generators would differ between two processes.
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)  # noqa: NPY002 - the global generator is part of the state
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(mode=True)
    # The gradients of layer norms are sums over the threads, so another number of threads gives other bits.
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    text = read_text()
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    logging.set_verbosity_error()
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": asymcheck.RngState()}
    pause = PauseInSave(arguments.pause_event, arguments.pause_step)
    checkpointer, first = None, 0
    if arguments.store:
        store = asymcheck.Store.open(arguments.store, create=True)
        checkpointer = asymcheck.Checkpointer(store, state, every=arguments.every, keep=None)
        report(f"stored {max((one.step for one in store.checkpoints()), default='nothing')}")
        restored = checkpointer.restore()
        first = restored.step + 1 if restored else 0
        report(f"restored {f'{restored.step} {state_digest(state)}' if restored else 'nothing'}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report(f"model {parameters} {len(text)} {torch.get_num_threads()}")
    with Path(arguments.log).open("a") as log, observe(pause):
        for step in range(first, arguments.steps):
            tokens = draw_batch(text)
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            log.write(json.dumps({"step": step, "loss": loss.item().hex(), "state": state_digest(state)}) + "\n")
            log.flush()
            if checkpointer is None:
                continue
            if step == pause.wanted:
                # Later events belong to the save of this step.
                checkpointer.wait()
                pause.step = step
            if checkpointer.step(step, metrics={"loss": loss.item()}):
                report(f"captured {step}")
    if checkpointer is not None:
        checkpointer.close()
    report(f"parts {' '.join(f'{name}={state_digest({name: part})}' for name, part in state.items())}")
    report(f"digest {state_digest(state)}")


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", required=True, help="file for losses and digests of states, one JSON object a line")
    parser.add_argument("--store", help="store to save to and resume from; none: train without checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: as many as torch chooses")
    parser.add_argument("--pause-event", default="", help="stop at this event …")
    parser.add_argument("--pause-step", type=int, default=-1, help="… of the save of this step, to be killed there")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
