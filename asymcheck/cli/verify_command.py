"""Commands that verify a store: verify, also with --repair or in shards, and merge-reports."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.options import Report, command, open_existing, store_argument
from asymcheck.cli.ray_shards import run_on_ray
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import InvalidInputError
from asymcheck.fsck.repair import Repaired
from asymcheck.fsck.verify import UNCHECKED, Finding, Severity, Shard, in_order
from asymcheck.fsck.verify import verify as verify_store
from asymcheck.storage.local_files import translated
from asymcheck.storage.remote import is_uri
from asymcheck.store import Store
from asymcheck.types import Progress

_INCOMPLETE = "incomplete-checkpoint"
_SHARD = re.compile(r"([0-9]{1,5})/([0-9]{1,5})", re.ASCII)
# Facts in which all shards of a check agree.
_SAME = {"store_id": "stores", "count": "numbers of shards", "run": "runs", "step": "steps", "deep": "depths (--deep)"}


def _parse_shard(text: str) -> Shard:
    """Parse a shard: ``0/7`` to ``6/7``."""
    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise click.BadParameter(f"{text!r}: give I/N with I from 0 to N-1, such as 0/7 to 6/7")
    return Shard(int(match[1]), int(match[2]))


@command("Check every byte of a store, and repair damage with --repair.")
@store_argument
@click.option("--run", help="Check only the manifests of this run [default: all runs; with --step: 'default'].")
@click.option("--step", type=int, help="Check only the checkpoints of this step.")
@click.option("--repair", is_flag=True, help="Repair the whole store first. No checkpoint is deleted.")
@click.option("--remote", help="With --repair: fetch lost data from this remote location.")
@click.option(
    "--deep", is_flag=True, help="For a remote location: also read every frame. Local frames are always read."
)
@click.option("--shard", metavar="I/N", type=_parse_shard, help="Check only shard I of N, from 0/N to N-1/N.")
@click.option("--on", type=click.Choice(["ray"]), help="Check in shards, as tasks on a Ray cluster.")
@click.option("--shards", type=click.IntRange(1, 99_999), help="With --on: number of shards [default: the CPUs].")
def verify(
    store: str,
    run: str | None,
    step: int | None,
    repair: bool,
    remote: str | None,
    deep: bool,
    shard: Shard | None,
    on: str | None = None,
    shards: int | None = None,
) -> Report:
    """Check every byte of STORE, or the checkpoints of one step. Nothing is changed without --repair.

    The check reads every frame and compares it with its digest. It compares manifests and records with their checksums,
    and looks up every partition that a checkpoint needs. For a remote location, it reads manifests, records, and the
    header, index and length of every pack. With --deep, it also reads every frame.

    --repair rewrites damaged records from their second copy, and copies intact frames of damaged packs into new packs.
    It fetches lost data from --remote, corrects the catalog, and removes files of killed processes. Then the store is
    checked, and the exit status reports the remaining damage.

    An incomplete checkpoint is not damage, because its save may still be running. With --step, the status is 1 if the
    step has no complete checkpoint.

    --shard cuts the check into N independent parts, for several processes or machines. The status of a shard is 0 if
    its check is complete, with or without damage. 'asymcheck merge-reports' merges the --json reports of all shards.

    --on ray runs the shards on the Ray cluster of RAY_ADDRESS, or of this machine, and merges their reports. Its
    machines need this version of asymcheck, and access to STORE.
    """
    if repair and (run is not None or step is not None or shard is not None or on is not None):
        raise click.UsageError("--repair works on the whole store: leave out --run, --step, --shard and --on")
    if on is not None and shard is not None:
        raise click.UsageError("--on runs all shards: leave out --shard")
    if on is None and shards is not None:
        raise click.UsageError("--shards requires --on ray; without it, give --shard I/N")
    if repair and is_uri(store):
        raise click.UsageError(
            "--repair works on a local store only. At a remote location, delete the packs in which --deep finds "
            "damage. Then run 'asymcheck push STORE LOCATION --all' with a store that has their checkpoints"
        )
    if remote is not None and not repair:
        raise click.UsageError("--remote requires --repair; to check a remote location, pass it as STORE")
    # As in other commands, a step without a run is a step of the default run.
    run = DEFAULT_RUN if run is None and step is not None else run
    is_deep = deep or not is_uri(store)
    repaired = None
    if repair:
        with open_existing(store, remote=remote) as opened, output.progress("repair") as progress:
            repaired = opened.repair(progress)
    with output.progress("verify", counts_bytes=on is None) as progress:
        if on is None:
            document = _check(store, run, step, shard or Shard(), progress, deep=is_deep)
        else:
            place = store if is_uri(store) else os.path.abspath(store)
            reports = run_on_ray(partial(_check, place, run, step, deep=is_deep), shards, progress)
            document = _merged({f"shard {number}": report for number, report in enumerate(reports)})
    return _report({**document, "store": store, "repaired": repaired}, is_shard=shard is not None, remote=remote)


def _check(
    store: str, run: str | None, step: int | None, shard: Shard, progress: Progress | None = None, *, deep: bool
) -> dict[str, Any]:
    """Return the document of a shard."""
    with Store.open(store, read_only=True) as opened:
        tier = opened.resources.tier
        findings, content = verify_store(tier, run, step, progress, deep=deep, shard=shard)
        # Names suffice. Store.checkpoints() would read every manifest a second time.
        listings = [
            listing
            for name in (tier.manifests.runs() if run is None else [run])
            for listing in tier.manifests.checkpoints(name)
            if step in (None, listing.ref.step)
        ]
    return {
        "store": store,
        "checkpoints": len(listings),
        "deep": deep,
        "repaired": None,
        "shard": {
            "index": shard.index,
            "count": shard.count,
            "store_id": tier.descriptor.store_id.hex(),
            "run": run,
            "step": step,
            # Whether other stores have further ranks of these checkpoints.
            "has_parts": any(listing.store_ranks and not listing.is_whole for listing in listings),
            "content": content,
        },
        "findings": findings,
    }


def _report(document: dict[str, Any], *, is_shard: bool = False, remote: str | None = None) -> Report:
    """Report the findings of a check or of a shard. The field ``shard`` of the document describes both."""
    findings, shard = document["findings"], document["shard"]
    incomplete = _named(findings, _INCOMPLETE)
    document = {**document, "lost": sorted(_lost(findings)), "incomplete": sorted(incomplete)}
    show = partial(_show_verified, document, is_shard=is_shard, remote=remote)
    if is_shard:
        return Report(document, show)
    is_lost = shard["step"] is not None and len(incomplete) == document["checkpoints"]
    return Report({**document, "shard": None}, show, exit_status.DAMAGED if is_lost else _status(findings))


def _show_verified(document: dict[str, Any], *, is_shard: bool, remote: str | None) -> None:
    findings, shard = document["findings"], document["shard"]
    if document["repaired"] is not None:
        _show_repaired(document["repaired"])
    for item in findings:
        output.print_entry(f"{item.severity.value} {item.kind}: {item.where}: {item.message}", _consequences(item))
    if is_shard:
        click.echo(
            f"shard {shard['index']}/{shard['count']}: {output.count(len(findings), 'finding')}; for the result of all "
            "shards, run each with --json, and pass the reports to 'asymcheck merge-reports'"
        )
        return
    _show_verdict(findings, document["checkpoints"], has_parts=shard["has_parts"])
    if not document["deep"]:
        click.echo("frames were not read; pass --deep to read and check them")
    if _status(findings) == exit_status.DAMAGED and not is_uri(document["store"]):
        if document["repaired"] is None:
            words = shlex.join(["asymcheck", "verify", document["store"], "--repair"])
            click.echo(output.printable(f"to repair: {words}; add --remote LOCATION if checkpoints were pushed"))
        elif remote is None:
            click.echo("if checkpoints were pushed, add --remote LOCATION to fetch lost data")


def _lost(findings: Sequence[Finding]) -> set[str]:
    return {name for finding in findings if finding.severity is Severity.ERROR for name in finding.checkpoints}


def _named(findings: Sequence[Finding], kind: str) -> set[str]:
    return {name for finding in findings if finding.kind == kind for name in finding.checkpoints}


def _show_repaired(repaired: Repaired) -> None:
    for done in repaired.done:
        click.echo(output.printable(f"found:     {done.where}: {done.found}"))
        click.echo(output.printable(f"repaired:  {done.where}: {done.done}"))
    for left in repaired.left:
        output.print_entry(f"remaining: {left.where}: {left.message}", [f"remedy: {left.remedy}"])
    if not repaired.done:
        click.echo("nothing to repair" if not repaired.left else "nothing could be repaired")


def _show_verdict(findings: Sequence[Finding], checkpoints: int, *, has_parts: bool) -> None:
    if not checkpoints:
        click.echo("no checkpoints to check")
        return
    lost, incomplete, unchecked = _lost(findings), _named(findings, _INCOMPLETE), _named(findings, UNCHECKED)
    verdict = f"{len(lost)} cannot be restored"
    if len(incomplete) == checkpoints:
        verdict = "none can be restored"
    elif not lost:
        others = "all" + (" other" if unchecked else "") + (" complete checkpoints" if incomplete else "")
        verdict = f"{others} can be restored"
        # An error that costs no checkpoint is a lost head record: then the newest checkpoint is not known.
        if any(item.severity is Severity.ERROR for item in findings):
            verdict += " by step, but the newest one is unknown"
        if has_parts:
            verdict = "all shards in this store are intact"
    rest = f"; {len(incomplete)} incomplete" if incomplete else ""
    rest += f"; {len(unchecked)} not checked" if unchecked else ""
    click.echo(f"{output.count(checkpoints, 'checkpoint')} checked: {verdict}{rest}")


def _consequences(finding: Finding) -> list[str]:
    label = {_INCOMPLETE: "incomplete", UNCHECKED: "not checked"}.get(finding.kind, "lost")
    checkpoints = [f"{label}: {name}" for name in finding.checkpoints]
    return [*checkpoints, f"tensors: {', '.join(finding.tensors)}"] if finding.tensors else checkpoints


def _status(findings: Sequence[Finding]) -> int:
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return exit_status.DAMAGED
    return exit_status.WARNINGS if Severity.WARNING in severities else exit_status.OK


@command("Merge the reports of all shards of a verification.")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE..."
)
def merge_reports(files: tuple[Path, ...]) -> Report:
    """Merge the JSON reports of all shards of 'asymcheck verify --shard'.

    The output and the exit status are those of 'asymcheck verify' without --shard. A report that is missing, of another
    store or check, or of another content of the store is refused.
    """
    return _report(_merged({str(path): _read_report(path) for path in files}))


def _merged(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the document of a check from those of its shards, by file or other name."""
    _check_shards({name: document["shard"] | {"deep": document["deep"]} for name, document in reports.items()})
    findings = in_order(finding for report in reports.values() for finding in report["findings"])
    return {**next(iter(reports.values())), "findings": findings}


def _read_report(path: Path) -> dict[str, Any]:
    """Return the document of a shard."""
    with translated("read", path):
        data = path.read_bytes()
    try:
        document: dict[str, Any] = json.loads(data)
        fields = ("index", "count", "store_id", "run", "step", "has_parts", "content")
        shard = {name: document["shard"][name] for name in fields}
        shard["index"] = range(shard["count"])[shard["index"]]
        rows = [{**row, "severity": Severity(row["severity"])} for row in document["findings"]]
        rows = [row | {name: tuple(row[name]) for name in ("checkpoints", "tensors")} for row in rows]
        facts = {name: document[name] for name in ("store", "checkpoints", "deep", "repaired")}
        return {**facts, "shard": shard, "findings": [Finding(**row) for row in rows]}
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidInputError(
            f"cannot merge {path}: it is no report of a shard, or its shard was killed. "
            "Run 'asymcheck verify STORE --shard I/N --json' for this shard again"
        ) from error


def _check_shards(shards: Mapping[str, Mapping[str, object]]) -> None:
    """Check that reports are those of all shards of one check, and that the store did not change."""
    (one, first), *_ = shards.items()
    names: dict[object, str] = {}
    for name, shard in shards.items():
        both, index = f"cannot merge {one} and {name}", shard["index"]
        for field, what in _SAME.items():
            if first[field] != shard[field]:
                values = f"{first[field]} and {shard[field]}"
                raise InvalidInputError(
                    f"{both}: they are of different {what}: {values}. Give the reports of one check"
                )
        if names.setdefault(index, name) is not name:
            raise InvalidInputError(f"cannot merge {names[index]} and {name}: both are shard {index}")
        if first["content"] != shard["content"]:
            raise InvalidInputError(
                f"{both}: the store changed between the shards, or their versions of asymcheck differ. Run all shards "
                "again while no process writes to the store, or with --step, which ignores other checkpoints"
            )
    if missing := [f"{index}/{first['count']}" for index in range(int(str(first["count"]))) if index not in names]:
        raise InvalidInputError(
            f"cannot merge {output.count(len(names), 'report')}: shards are missing: {output.abbreviated(missing)}. "
            "Run 'asymcheck verify' for each of them with --shard and --json, and give all reports"
        )
