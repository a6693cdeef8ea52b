"""Check promises that every store must keep after any failure."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from asymcheck.format import layout
from asymcheck.fsck.verify import Severity
from asymcheck.store import Store
from asymcheck.types import Digest
from tests.crash.actions import open_store
from tests.crash.states import CONFIG, Promises, fingerprint, make_state

ROOM_BYTES = 256 * 1024
"""Maximum bytes for each checkpoint of a collected store: twice the size of one checkpoint in these tests."""


@dataclasses.dataclass
class CheckResult:
    """Results of a check."""

    steps: dict[str, list[int]]
    """Existing steps, by run."""


def check_survived(path: Path, promised: Promises) -> CheckResult:
    """Check a store after a crash, first unchanged, then with a further save and a garbage collection.

    Raises:
        AssertionError: a promise is broken; the message says which.
    """
    before = _files(path)
    found = check_unrepaired(path, promised)
    assert _files(path) == before, "a read-only look changed the store"
    check_goes_on(path, promised)
    return found


def check_unrepaired(path: Path, promised: Promises) -> CheckResult:
    """Check the promises of the store before any repair, with a read-only store.

    Every durable checkpoint exists bit for bit, every existing checkpoint is complete, and no deleted one has returned.
    """
    if not (path / layout.DESCRIPTOR_NAME).exists():
        assert not promised.durable, "the store itself is gone, with what was reported durable"
        return CheckResult({})
    found: dict[str, list[int]] = {}
    with warnings.catch_warnings(), open_store(path, read_only=True) as store:
        warnings.simplefilter("error")
        for checkpoint in store.checkpoints():
            key = (checkpoint.run, checkpoint.step)
            assert key in promised.begun, f"{key} is there, and was never saved"
            assert key not in promised.deleted, f"{key} was deleted and is back"
            assert checkpoint.complete, f"{key} is there in part"
            found.setdefault(checkpoint.run, []).append(checkpoint.step)
            _check_bytes(store, key, promised)
        for key in promised.durable:
            assert key[1] in found.get(key[0], []), f"{key} was reported durable and is lost"
        for run in found:
            newest = store.restore(run=run)
            assert newest.skipped == (), f"the newest of {run} could not be restored"
            step, allowed = newest.checkpoint.step, promised.newest.get(run)
            assert not allowed or step in allowed, f"{run}: {step} is taken for the newest, not one of {allowed}"
        findings = [finding for finding in store.verify() if finding.severity is not Severity.HINT]
        assert findings == [], "verify finds damage"
    return CheckResult(found)


def _check_bytes(store: Store, key: tuple[str, int], promised: Promises) -> None:
    run, step = key
    restored = store.restore(step, run=run)
    assert restored.skipped == (), f"{key}: an attempt to save it is there that cannot be restored"
    assert fingerprint(restored.state) == promised.begun[key], f"{key} was restored with other bytes"


def check_goes_on(path: Path, promised: Promises) -> None:
    """Check that the store accepts the next save, and that garbage collection removes all leftovers of a crash."""
    with open_store(path) as store:
        steps_by_run: dict[str, list[int]] = {}
        for run in sorted({"default", *(run for run, _ in promised.begun)}):
            steps = [checkpoint.step for checkpoint in store.checkpoints(run)]
            step = max(steps, default=-1) + 1
            state = make_state(step, salt=9)
            store.save(state, step=step, run=run)
            assert fingerprint(store.load(step, run=run)) == fingerprint(state), "the next save holds other bytes"
            steps_by_run[run] = [*steps, step]
        store.gc()
        assert leftovers(store) == []
        second = store.gc()
        assert (second.freed_packs, second.removed_temporaries, second.busy_packs) == (0, 0, 0), "gc leaves work to gc"
        assert [str(finding) for finding in store.verify()] == [], "verify finds something after gc"
        for run, steps in steps_by_run.items():
            assert sorted(c.step for c in store.checkpoints(run)) == sorted(steps), "gc changed the checkpoints"
            for step in steps[:-1]:
                _check_bytes(store, (run, step), promised)
        # Save once more, because the next save may reuse a partition of a leftover pack, and so keep the pack.
        most = ROOM_BYTES * (1 + sum(map(len, steps_by_run.values())))
        assert store.resources.usage().pack_bytes <= most, "packs take more than the checkpoints need"
    pooled = sum(file.stat().st_size for file in (path / layout.POOL).iterdir())
    assert pooled <= CONFIG.pool_bytes, "the pool outgrew its limit"


def check_steps(store: Store, steps: dict[int, int]) -> None:
    """Check that exactly these steps exist, each with the state of the given step, and that no leftover exists."""
    assert {checkpoint.step for checkpoint in store.checkpoints()} == set(steps)
    for step, content in steps.items():
        assert fingerprint(store.load(step)) == fingerprint(make_state(content))
    store.gc()
    assert leftovers(store) == []
    assert store.verify() == []
    for step, content in steps.items():
        assert fingerprint(store.load(step)) == fingerprint(make_state(content))


def leftovers(store: Store) -> list[str]:
    """Return unexpected files, packs and catalog entries of a collected store.

    A store that another process uses may have some.
    """
    tier, root = store.resources.tier, store.path
    needed: set[Digest] = set()
    expected = {root / layout.DESCRIPTOR_NAME, root / layout.CATALOG}
    expected |= {root / name for name in (layout.HEADS, layout.MANIFESTS, layout.PACKS, layout.POOL)}
    manifests = set()
    if (root / layout.LOCKS).exists():
        notes = (root / layout.LOCKS).glob("*.location")
        expected |= {root / layout.LOCKS, *(root / layout.LOCKS).glob("*.lock"), *notes}
    for run in tier.manifests.runs():
        heads = root / layout.HEADS / run
        if tier.manifests.heads(run):
            expected |= {*(heads / layout.head_name(number) for number in tier.manifests.heads(run))}
        expected |= {heads, root / layout.MANIFESTS / run}
        for listing in tier.manifests.checkpoints(run):
            directory = tier.manifests.directory(run, listing.ref)
            expected |= {directory, *(directory / str(name) for name in listing.manifests)}
            for name in listing.manifests:
                needed |= set(tier.manifests.read(run, listing.ref, name).partitions())
                manifests.add(f"{run}/{directory.name}/{name}".encode())
    unexpected = []
    for pack_id in tier.pack_ids():
        path = tier.packs / layout.pack_name(pack_id)
        pack = tier.open_pack(pack_id)
        if needed.isdisjoint(pack.digests()):
            unexpected.append(f"pack {path.name}, which nothing needs")
        pack.close()
        expected.add(path)
    expected |= set(tier.pool.sizes())
    with store.resources.catalog().read() as transaction:
        unexpected += [f"pin {key.hex()}" for key in transaction.pins()]
        unexpected += [f"freed pack {pack_id.hex()}" for pack_id in transaction.freed_packs()]
        unexpected += [f"row of {key.decode()}" for key in transaction.manifests() - manifests]
    actual = {path for path in root.rglob("*") if root / layout.CATALOG not in path.parents}
    markers = list((root / layout.CATALOG / "open").iterdir())
    unexpected += [f"marker {marker.name}" for marker in markers if not marker.name.startswith(f"{_own_pid()}-")]
    return unexpected + sorted(str(path.relative_to(root)) for path in actual - expected)


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def _files(path: Path) -> dict[str, int]:
    return {str(file): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}
