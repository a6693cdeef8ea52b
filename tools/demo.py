"""The demo: train a model on real text, kill it during saves, resume, and compare with an uninterrupted run.

Run it with ``make demo``. It exits with status 1 if a single loss or a single byte of a state differs: after a step,
after a restore, or at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from asymcheck.types import counted

STEPS = 40
EVERY = 5
KILLS = (("frame.written", 15), ("pack.sealed", 25))
"""Events at which the two runs are killed: between the partitions of a save, and just before the commit of a save."""

STATE_ON_DISK = {
    "frame.written": "some partitions are on disk, the pack has no index yet",
    "pack.sealed": "all partitions are on disk, the manifest is not",
}


def run_training(folder: Path, name: str, extra: list[str]) -> tuple[str, dict[str, str]]:
    """Run one training process; return its exit status and output. Kill the process when it pauses in a save."""
    log = str(folder / f"{name}.jsonl")
    command = [sys.executable, "-m", "tools.demo_train", "--log", log, "--steps", str(STEPS), *extra]
    reports: dict[str, str] = {}
    # Nothing is downloaded: the model starts from random weights.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            word, _, rest = line.strip().partition(" ")
            reports[word] = rest
            if word == "paused":
                process.send_signal(signal.SIGKILL)
            elif word == "captured":
                print(f"    step {rest} captured; it is written while training goes on", flush=True)
            elif word == "restored" and rest != "nothing":
                step = rest.split()[0]
                where = (
                    ""
                    if step == reports["stored"]
                    else f"the disk has step {reports['stored']}, memory has step {step}; "
                )
                print(
                    f"    {where}restored step {step}, every byte verified; goes on with step {int(step) + 1}",
                    flush=True,
                )
    check_restored(Path(log), reports)
    if process.returncode == -signal.SIGKILL:
        return "killed", reports
    if process.returncode:
        sys.exit(f"the training process failed with status {process.returncode}")
    return "finished", reports


def read_log(path: Path) -> dict[int, tuple[str, str]]:
    """Return the loss as exact hexadecimal, and the digest of the state, of each step.

    For a step that was trained twice, the later line counts.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: (line["loss"], line["state"]) for line in lines}


def check_restored(log: Path, reports: dict[str, str]) -> None:
    """End with an error if a process has restored another state than the killed process had after that step.

    Otherwise a wrong restore could not be distinguished from a training that is not deterministic.
    """
    step, _, state = reports.get("restored", "nothing").partition(" ")
    if state and state != read_log(log)[int(step)][1]:
        sys.exit(f"FAILED: the restored state differs from the state that the killed process had after step {step}")


def compare(folder: Path, reference_reports: dict[str, str], resumed_reports: dict[str, str]) -> str:
    """Print both runs side by side and return what differs; an empty text if they are equal in every bit."""
    reference, resumed = read_log(folder / "uninterrupted.jsonl"), read_log(folder / "killed.jsonl")
    print("\n  step   loss, never stopped   loss, killed twice    equal")
    for step in sorted(reference):
        if step % EVERY == 0 or step == STEPS - 1:
            left, right = (float.fromhex(log[step][0]) if step in log else math.nan for log in (reference, resumed))
            print(f"  {step:4d}   {left:<20.16g}  {right:<20.16g}  {'yes' if left == right else 'NO'}")
    steps = [step for step in sorted(reference) if reference[step] != resumed.get(step)]
    each = f"DIFFERENT from step {steps[0]} on" if steps else "equal in every bit"
    print(f"\n  losses and states of all {len(reference)} steps: {each}")
    reference_digest, resumed_digest = reference_reports["digest"], resumed_reports["digest"]
    both = zip(reference_reports["parts"].split(), resumed_reports["parts"].split(), strict=True)
    parts = [left.partition("=")[0] for left, right in both if left != right]
    state = "equal in every bit" if reference_digest == resumed_digest else f"DIFFERENT: {', '.join(parts)}"
    print("  final state (weights, both Adam moments, schedule, random generators):")
    print(f"    never stopped  {reference_digest}\n    killed twice   {resumed_digest}\n    {state}")
    different = [f"losses or states {each}"] if steps else []
    if reference_digest != resumed_digest:
        different.append(f"final state {state}")
    return "; ".join(different)


def show_store(store: Path) -> bool:
    """Print the output of the command line for the store; return whether verify found no problem."""
    sound = True
    for command in ("inspect", "verify"):
        print(f"\n$ asymcheck {command} {store}", flush=True)
        done = subprocess.run([sys.executable, "-m", "asymcheck", command, str(store)], check=False)
        sound = sound and done.returncode == 0
    return sound


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for store and logs; emptied first")
    folder: Path = parser.parse_args().out
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    store = folder / "store"

    print(
        f"1. A GPT-2 learns the sources of Python's standard library for {STEPS} steps, never stopped, no checkpoints."
    )
    _, reference = run_training(folder, "uninterrupted", [])
    parameters, text, threads = reference["model"].split()
    size = f"{int(parameters):,} parameters, {int(text):,} bytes of text, {counted(int(threads), 'thread')}"
    print(f"    {size}, final state {reference['digest'][:16]}…")

    resumed: dict[str, str] = {}
    for number, kill in enumerate((*KILLS, None), start=2):
        verb = f"The same training with a checkpoint every {EVERY} steps" if number == 2 else "Started again"
        print(f"{number}. {verb}{f', to be killed in the save of step {kill[1]}' if kill else ', to the end'}.")
        pause = ["--pause-event", kill[0], "--pause-step", str(kill[1])] if kill else []
        options = ["--store", str(store), "--every", str(EVERY), "--threads", threads]
        ended, resumed = run_training(folder, "killed", [*options, *pause])
        if kill is not None:
            assert ended == "killed", "the process was to be killed in a save, but ended by itself"
            print(f"    SIGKILL in the middle of the save of step {kill[1]}: {STATE_ON_DISK[kill[0]]}")

    different = compare(folder, reference, resumed)
    sound = show_store(store)
    passed = sound and not different
    verdict = f"killed twice in the middle of a save, resumed twice, {different or 'no bit of difference'}"
    print(f"\n{'OK' if passed else 'FAILED'}: {verdict}. {time.monotonic() - began:.0f} s")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
