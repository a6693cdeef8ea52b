"""Run one parser with many inputs in a child with little memory, and return the results."""

import base64
import mmap
import random
import time
import traceback
from collections import Counter
from pathlib import Path

import pyarrow as pa

from asymcheck.errors import FormatError
from tests.damage.memory_limit import limit_memory, unlimit_memory
from tests.fuzz import mutate
from tests.fuzz.hostile_manifests import FAMILIES, PERHAPS
from tests.fuzz.targets import TARGETS, RefusedError, Target

MEMORY_BYTES = 64 << 20
MEMORY_FACTOR = 16
SECONDS = 2.0
_SHOWN = 5


def input_number(target: Target, seeds: list[bytes], seed: int, number: int) -> bytes:
    """Return the same input for the same numbers, so that a fatal input can be reproduced."""
    dice = random.Random(f"{seed} {number}")
    data = target.change(dice.choice(seeds), dice)
    return mutate.bytes_of(data, dice) if dice.random() < 0.05 else data


def run(name: str, seed: int, count: int, progress: str) -> dict[str, object]:
    """Parse ``count`` inputs; each must end soon and with little memory, in a value or in a FormatError."""
    pa.set_memory_pool(pa.system_memory_pool())
    target = TARGETS[name]
    seeds = target.seeds()
    for data in seeds:
        target.read(data)
    done = _counter(progress)
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    slowest = 0.0
    for number in range(count):
        done[:8] = number.to_bytes(8, "little")
        data = input_number(target, seeds, seed, number)
        kind, took = attempt(target, data)
        slowest = max(slowest, took)
        if took > SECONDS:
            kind = f"took {took:.1f} s: {kind}"
        if "\n" in kind or took > SECONDS:
            problems.append(f"input {number} of seed {seed}: {base64.b64encode(data[:3000]).decode()}\n{kind}")
            kind = "problem"
        outcomes[kind] += 1
    return {"outcomes": dict(outcomes), "problems": problems[:_SHOWN], "slowest": slowest}


def attempt(target: Target, data: bytes) -> tuple[str, float]:
    """Parse one input under the limits; return the outcome, a traceback if it is a bug, and the time."""
    limit_memory(MEMORY_BYTES + MEMORY_FACTOR * len(data))
    begin = time.process_time()
    try:
        target.read(data)
        kind = "accepted"
    except RefusedError:
        kind = "refused"
    except FormatError as error:
        kind = error.kind
        if not str(error) or _ran_out_of_memory(error):
            kind = traceback.format_exc()
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        kind = traceback.format_exc()
    finally:
        unlimit_memory()
    return kind, time.process_time() - begin


def _ran_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _counter(path: str) -> mmap.mmap:
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)


def run_cases(family: str) -> dict[str, object]:
    """Read every hostile manifest of a family; return the error of each."""
    pa.set_memory_pool(pa.system_memory_pool())
    target = TARGETS["manifest"]
    for data in target.seeds():
        target.read(data)
    outcomes = {}
    for name, data in {**FAMILIES, **PERHAPS}[family]():
        kind, took = attempt(target, data)
        outcomes[name] = kind if took <= SECONDS else f"took {took:.1f} s: {kind}"
    return outcomes
