"""``asymcheck doctor``: measure the machine and the drive, and say what to configure."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from asymcheck.cli import output
from asymcheck.cli.options import (
    Report,
    command,
    open_existing,
    parse_size,
    parse_span,
    ring_folder_option,
    store_argument,
)
from asymcheck.config import StoreConfig
from asymcheck.measurement import planned_bytes
from asymcheck.policies.advice import IDENTITY, Advice, Facts, Situation, advise

# From here on a time in ms has no decimals.
_DIGITS_S = 0.1


@command("Measure the machine and the drive, and say what to configure.")
@store_argument
@click.option("--quick", is_flag=True, help="Measure less and for less long: about a second instead of ten.")
@click.option(
    "--mtbf", default="1d", show_default=True, callback=parse_span, help="Mean time between failures, as 90min, 3h, 2d."
)
@click.option(
    "--state-size", callback=parse_size, help="Bytes of one checkpoint, as 1.5GB [default: those of the newest]."
)
@ring_folder_option
def doctor(store: str, quick: bool, mtbf: float, state_size: int | None, ring_folder: Path) -> Report:
    """Measure what STORE's drive, the memory and the codecs do here, and say what to configure.

    It writes into a file inside the store and removes it; how much, it says first. When it is killed, 'asymcheck gc'
    removes that file. Codecs are measured on tensors of the newest checkpoint. Measure on an idle machine, and again
    while training: what else runs takes its share.
    """
    with open_existing(store) as opened:
        output.note(f"measuring writes up to {output.size(planned_bytes(quick=quick))} into {store} and removes it")
        facts = opened.measure(quick=quick, ring_folder=ring_folder)
    size = state_size or facts.state_bytes or 0
    # What fits into one partition is cut, batched and encoded in one way only.
    is_small = size <= StoreConfig.partition_bytes
    # A pack larger than the pool could never be kept to be overwritten.
    config = StoreConfig()
    situation = Situation(size, mtbf, config.partition_bytes, config.pack_bytes, config.pool_bytes)
    advice = None if is_small else advise(facts, situation)
    document = {"store": store, "quick": quick, "facts": facts, "advice": advice}
    return Report(document, partial(_show, facts, advice, size))


def _show(facts: Facts, advice: Advice | None, size: int) -> None:
    _show_facts(facts)
    _show_codecs(facts)
    if advice is None:
        known = (
            f"checkpoints of {output.size(size)} leave nothing to tune: the defaults fit"
            if size
            else "no checkpoint yet"
        )
        click.echo(f"{known}; for what is to be saved, name its bytes, as in --state-size 1.5GB")
        return
    _show_advice(advice)


def _show_facts(facts: Facts) -> None:
    drive = facts.drive
    rows = [
        ("copy in memory, one thread", _rate(facts.copy_bytes_per_s)),
        ("digest, one thread", _rate(facts.digest_bytes_per_s)),
        ("write over a file", _rate(drive.write_bytes_per_s)),
        ("write over a file, durable", _rate(drive.durable_write_bytes_per_s)),
        ("write a new file, durable", _rate(drive.durable_new_bytes_per_s)),
        ("read", _rate(drive.read_bytes_per_s)),
        ("one block durable, median", _ms(drive.write_latency_median_s)),
        ("one block durable, 95 of 100 within", _ms(drive.write_latency_p95_s)),
        ("one pack durable, besides its bytes", _ms(drive.flush_latency_s)),
        ("room for a ring", output.size(facts.ring_room_bytes)),
    ]
    if facts.device_copy_bytes_per_s is not None:
        rows.insert(1, (f"copy from {facts.device}", _rate(facts.device_copy_bytes_per_s)))
    output.print_table([{"measured": what, "": measured} for what, measured in rows], numbers=[""])


def _show_codecs(facts: Facts) -> None:
    click.echo(f"codecs on {facts.sample}, one thread")
    rows = [
        {
            "role": one.role,
            "dtype": one.dtype,
            "codec": one.codec,
            "ratio": f"{one.ratio:.3f}",
            "encode": _rate(one.encode_bytes_per_s),
            "decode": _rate(one.decode_bytes_per_s),
        }
        for one in facts.codecs
    ]
    output.print_table(rows, numbers=("ratio", "encode", "decode"))


def _show_advice(advice: Advice) -> None:
    situation, batch, interval, ring = advice.situation, advice.batch, advice.interval, advice.ring
    present = output.size(situation.pack_bytes)
    click.echo(
        f"advice for checkpoints of {output.size(situation.state_bytes)} and a failure every "
        f"{output.duration(round(situation.mtbf_s * 1e9))}"
    )
    output.print_entry(
        f"pack_bytes {batch.pack_bytes} ({output.size(batch.pack_bytes)})",
        [
            f"durable in {_time(batch.flush_s)}; {_time(batch.present_flush_s)} with {present}",
            batch.reason,
        ],
    )
    output.print_entry(f"stall of at most {_time(advice.stall.stall_s)}", [advice.stall.reason])
    output.print_entry(
        f"a checkpoint every {_time(interval.interval_s)}",
        [f"{interval.lost_share:.2%} of the time is then lost, restarts apart", interval.reason],
    )
    output.print_entry(
        f"ring_bytes {ring.ring_bytes} ({output.size(ring.ring_bytes)})",
        [f"wanted {output.size(ring.wanted_bytes)}, room {output.size(ring.room_bytes)}", ring.reason],
    )
    for codec in advice.codecs:
        choice = "store plain" if codec.codec == IDENTITY else codec.codec
        output.print_entry(f"{codec.role} {codec.dtype}: {choice}", [codec.reason])


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= _DIGITS_S else f"{seconds * 1e3:.3g} ms"


def _time(seconds: float) -> str:
    return output.duration(round(seconds * 1e9)) if seconds >= 1 else _ms(seconds)
