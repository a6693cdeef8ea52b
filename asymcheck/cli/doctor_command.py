"""``asymcheck doctor``: measure the machine and the drive, and recommend settings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import click

from asymcheck.cli import output
from asymcheck.cli.options import (
    Report,
    command,
    open_existing,
    parse_duration,
    parse_size,
    ring_folder_option,
    store_argument,
)
from asymcheck.config import StoreConfig
from asymcheck.inspect.sample import measure_store
from asymcheck.measurement import planned_bytes
from asymcheck.policies.advice import IDENTITY, Advice, Facts, Situation, advise, rate
from asymcheck.policies.interval import span

_PACK_BYTES_MAX: Final = 4 << 30
"""Largest pack to recommend."""


@command("Measure the machine and the drive, and recommend settings.")
@store_argument
@click.option("--quick", is_flag=True, help="Measure for about 1 s instead of 10 s.")
@click.option(
    "--mtbf",
    metavar="TIME",
    default="1d",
    show_default=True,
    type=parse_duration,
    help="Mean time between failures, for example 90min, 3h or 2d.",
)
@click.option(
    "--state-size",
    metavar="SIZE",
    type=parse_size,
    help="Size of one checkpoint, for example 1.5GB [default: size of the newest checkpoint].",
)
@ring_folder_option
def doctor(store: str, quick: bool, mtbf: float, state_size: int | None, ring_folder: Path) -> Report:
    """Measure memory, codecs and the drive of STORE, and recommend settings.

    The command writes a temporary file into the store, and deletes it at the end. If the command is killed,
    'asymcheck gc' deletes the file. Codecs are measured on tensors of the newest checkpoint.

    Other programs affect the result. Measure on an idle machine first, then again while training.
    """
    with open_existing(store) as opened:
        tier, written = opened.resources.nvme, output.size(planned_bytes(quick=quick))
        output.note(f"measuring: writes up to {written} to a temporary file in {store}, then deletes the file")
        facts = measure_store(tier, ring_folder, quick=quick)
    size = state_size or facts.state_bytes or 0
    defaults = StoreConfig()
    situation = Situation(size, mtbf, defaults.partition_bytes, defaults.pack_bytes, _PACK_BYTES_MAX)
    # No setting matters to a state of a single partition.
    advice = None if size <= defaults.partition_bytes else advise(facts, situation)
    document = {"store": store, "quick": quick, "facts": facts, "advice": advice}
    return Report(document, partial(_show, facts, advice, size, store))


def _show(facts: Facts, advice: Advice | None, size: int, store: str) -> None:
    _show_facts(facts)
    _show_codecs(facts)
    if advice is None:
        reason = (
            f"no tuning needed for checkpoints of {output.size(size)}: the defaults fit"
            if size
            else "no checkpoints yet"
        )
        click.echo(f"{reason}. For another checkpoint size, pass for example --state-size 1.5GB")
        return
    _show_advice(advice, store)


def _show_facts(facts: Facts) -> None:
    drive = facts.drive
    rows = [
        ("memory copy, 1 thread", rate(facts.copy_bytes_per_s)),
        ("digest, 1 thread", rate(facts.digest_bytes_per_s)),
        ("overwrite a file", rate(drive.write_bytes_per_s)),
        ("overwrite a file, with fsync", rate(drive.durable_write_bytes_per_s)),
        ("write a new file, with fsync", rate(drive.durable_new_bytes_per_s)),
        ("read a file", rate(drive.read_bytes_per_s)),
        ("durable write of one block, median", span(drive.write_latency_median_s)),
        ("durable write of one block, 95th percentile", span(drive.write_latency_p95_s)),
        ("pack flush latency, without data transfer", span(drive.flush_latency_s)),
        ("memory available for a ring", output.size(facts.ring_room_bytes)),
    ]
    if facts.device_copy_bytes_per_s is not None:
        rows.insert(1, (f"copy from {facts.device}", rate(facts.device_copy_bytes_per_s)))
    output.print_table([{"measurement": name, "result": result} for name, result in rows], numbers=["result"])


def _show_codecs(facts: Facts) -> None:
    if not facts.codecs:
        return
    click.echo(f"codecs on {facts.sample}, 1 thread")
    rows = [
        {
            "role": codec.role,
            "dtype": codec.dtype,
            "codec": codec.codec,
            "ratio": f"{codec.ratio:.3f}",
            "encode": rate(codec.encode_bytes_per_s),
            "decode": rate(codec.decode_bytes_per_s),
        }
        for codec in facts.codecs
    ]
    output.print_table(rows, numbers=("ratio", "encode", "decode"))


def _show_advice(advice: Advice, store: str) -> None:
    situation, batch, interval, ring = advice.situation, advice.batch, advice.interval, advice.ring
    present = output.size(situation.pack_bytes)
    click.echo(
        f"advice for checkpoints of {output.size(situation.state_bytes)} and one failure every {span(situation.mtbf_s)}"
    )
    output.print_entry(
        f"pack_bytes {batch.pack_bytes} ({output.size(batch.pack_bytes)})",
        [
            f"durable in {span(batch.flush_s)}; {span(batch.present_flush_s)} with packs of {present}",
            batch.reason,
        ],
    )
    output.print_entry(f"stall of at most {span(advice.stall.stall_s)}", [advice.stall.reason])
    output.print_entry(
        f"a checkpoint every {span(interval.interval_s)}",
        [
            f"{interval.lost_share:.2%} of the training time is lost to checkpoints and failures, without restarts",
            interval.reason,
        ],
    )
    output.print_entry(
        f"ring_bytes {ring.ring_bytes} ({output.size(ring.ring_bytes)})",
        [f"two states need {output.size(ring.wanted_bytes)}; {output.size(ring.room_bytes)} available", ring.reason],
    )
    for codec in advice.codecs:
        choice = "store plain" if codec.codec == IDENTITY else codec.codec
        output.print_entry(f"{codec.role} {codec.dtype}: {choice}", [codec.reason])
    click.echo(_configuration(advice, store))


def _configuration(advice: Advice, store: str) -> str:
    """Return Python code that applies the advice."""
    return f"""
from datetime import timedelta

import asymcheck

# The advice as code. Codecs are chosen by the default compression="auto".
config = asymcheck.StoreConfig(pack_bytes={advice.batch.pack_bytes})
capture = asymcheck.CaptureConfig(ring_bytes={advice.ring.ring_bytes})
store = asymcheck.Store.open({store!r}, config=config, create=True)
interval = asymcheck.AutoInterval(mtbf=timedelta(seconds={advice.situation.mtbf_s:.0f}))
checkpointer = asymcheck.Checkpointer(store, state, every=interval, capture=capture)"""
