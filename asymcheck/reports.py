"""What a store tells about itself, without changing it."""

from __future__ import annotations

import os
from pathlib import Path

from asymcheck.arguments import check_glob, check_step, check_which
from asymcheck.config import DEFAULT_RUN, CaptureConfig
from asymcheck.errors import InvalidInputError
from asymcheck.format import layout
from asymcheck.measure import NOISE, measure, noise_samples
from asymcheck.policies.facts import Facts
from asymcheck.recovery.accounting import Accounting, account
from asymcheck.recovery.describe import describe, known_line
from asymcheck.recovery.difference import Difference, compare
from asymcheck.recovery.history import History, read_history
from asymcheck.recovery.inventory import StoredTensor, StoredValue, inventory, values
from asymcheck.recovery.resolve import candidates, check_run_exists
from asymcheck.recovery.rings import newer_than_stored, survey_rings
from asymcheck.recovery.sample import sample
from asymcheck.tiers.dram_ring import RingCapture, RingFile
from asymcheck.tiers.nvme import NvmeTier
from asymcheck.tiers.reading import ReadTier
from asymcheck.tiers.remote import RemoteTier
from asymcheck.types import Checkpoint, Progress, Usage
from asymcheck.verify import Finding, verify

_SAMPLE_BYTES = 8 << 20
_QUICK_SAMPLE_BYTES = 1 << 20


class Reports:
    """An opened store, as far as it only answers questions; :class:`asymcheck.Store` adds the rest."""

    def __init__(self, tier: ReadTier) -> None:
        """Wrap an opened tier; use :meth:`open`."""
        if not isinstance(tier, (NvmeTier, RemoteTier)):
            raise InvalidInputError(f"Store({tier!r:.100}): use Store.open(location)")
        self._tier: ReadTier = tier

    @property
    def location(self) -> str:
        """Where the store lies: a path, or a URI."""
        return str(self._tier.root)

    @property
    def path(self) -> Path:
        """The store's directory.

        Raises:
            InvalidInputError: it lies in a remote location, see :attr:`location`.
        """
        return self._nvme.root

    @property
    def store_id(self) -> str:
        """The store's id: 32 hexadecimal digits, the same wherever it is opened."""
        return self._tier.descriptor.store_id.hex()

    @property
    def _nvme(self) -> NvmeTier:
        """The tier, for what only a store on a local drive can do."""
        if not isinstance(self._tier, NvmeTier):
            raise InvalidInputError(f"store {self.location}: only a store on a local drive can do that; pull it first")
        return self._tier

    def checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, oldest first, by their names.

        Tensor bytes are not checked, :meth:`verify` does that.
        """
        self._tier.check_usable()
        found = []
        for name in self._tier.manifests.runs() if run is None else [layout.check_run(run)]:
            line = known_line(self._tier, name)
            found += [describe(self._tier, listing, line) for listing in self._tier.manifests.checkpoints(name)]
        return found

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        self._tier.check_usable()
        return self._tier.manifests.runs()

    def tensors(
        self, step: int | str | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredTensor]]:
        """Return a checkpoint, the newest by default, and its tensors that match a glob; reads no tensor bytes."""
        self._tier.check_usable()
        step = None if step is None else check_which(step)
        check_glob(pattern)
        ref, tensors = inventory(self._tier, layout.check_run(run), step, pattern)
        return describe(self._tier, self._tier.manifests.listing(run, ref), known_line(self._tier, run)), tensors

    def values(
        self, step: int | str | None = None, pattern: str = "*", *, run: str = DEFAULT_RUN
    ) -> tuple[Checkpoint, list[StoredValue]]:
        """Return a checkpoint, the newest by default, and its plain values that match a glob, as texts."""
        self._tier.check_usable()
        step = None if step is None else check_which(step)
        check_glob(pattern)
        ref, found = values(self._tier, layout.check_run(run), step, pattern)
        return describe(self._tier, self._tier.manifests.listing(run, ref), known_line(self._tier, run)), found

    def history(self, run: str = DEFAULT_RUN, *, everything: bool = False) -> History:
        """Return the checkpoints along the line of training, newest first, and where training went back.

        With ``everything`` also those that are abandoned, incomplete or damaged. Reads no tensor bytes.

        Raises:
            CheckpointNotFoundError: the store has other runs, but not this one.
            HeadRecordError: the line cannot be followed; with ``everything`` the result says so instead.
        """
        self._tier.check_usable()
        return read_history(self._tier, layout.check_run(run), everything=everything)

    def diff(
        self,
        a: int | str,
        b: int | str,
        *,
        run: str = DEFAULT_RUN,
        tensors: str = "*",
        norms: bool = True,
        progress: Progress | None = None,
    ) -> Difference:
        """Return what changed between two checkpoints, every byte that was read verified.

        Args:
            a: a step, or ``"save:"`` and the first digits of a save id; either may have ``"<run>@"`` before it.
            b: likewise.
            run: whose checkpoints, where the names do not say.
            tensors: a glob of the dotted names to compare.
            norms: whether to read what changed and say by how much; without, only manifests are read.
            progress: called with bytes compared so far and in all.

        Raises:
            InvalidInputError, CheckpointNotFoundError, InconsistentCheckpointError, MissingPartitionError,
            DamagedPartitionError, FormatError, HeadRecordError
        """
        self._tier.check_usable()
        return compare(self._tier, a, b, run=run, tensors=tensors, norms=norms, progress=progress)

    def accounting(self, run: str | None = None) -> Accounting:
        """Return which checkpoint and which role needs how many bytes, and what :meth:`gc` would free.

        Reads manifests and the indexes of packs only.

        Raises:
            CheckpointNotFoundError: the store has other runs, but not this one.
        """
        self._tier.check_usable()
        return account(self._nvme, None if run is None else layout.check_run(run))

    def rings(
        self,
        run: str | None = None,
        *,
        ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder,
        check: bool = True,
    ) -> list[RingFile]:
        """Return the rings of this store in memory, of living processes and of killed ones, with what lies in them.

        With ``check`` every frame of what killed processes left is read and verified. Nothing is changed.
        """
        self._tier.check_usable()
        return survey_rings(self._tier, Path(ring_folder), None if run is None else layout.check_run(run), check=check)

    def only_in_memory(
        self, run: str | None = None, *, ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder
    ) -> list[RingCapture]:
        """Return, of each run, the newest capture that killed processes left complete in memory.

        Only of runs in which it is newer than every checkpoint of the store. Its frames are not checked.
        """
        return newer_than_stored(self._tier, self.rings(run, ring_folder=ring_folder, check=False))

    def usage(self) -> Usage:
        """Return the bytes that the store takes on disk."""
        self._tier.check_usable()
        return Usage(self._tier.descriptor.store_id.hex(), *self._tier.usage())

    def verify(
        self,
        step: int | None = None,
        *,
        run: str | None = None,
        progress: Progress | None = None,
        deep: bool = True,
    ) -> list[Finding]:
        """Read and check every byte of the store, or what one step needs.

        Without ``deep`` no frame is read: manifests, records, and header, index and length of each pack are checked,
        and that every partition lies in one. Damage inside of frames is not seen then.

        Returns what is wrong; nothing when all is well.

        Raises:
            CheckpointNotFoundError: there is no such step or run.
        """
        self._tier.check_usable()
        if step is not None:
            step = check_step(step)
            run = run or DEFAULT_RUN
            candidates(self._tier, run, step)
        elif run is not None:
            check_run_exists(self.location, layout.check_run(run), self.runs())
        return verify(self._tier, run, step, progress, deep=deep)

    def measure(self, *, quick: bool = False, ring_folder: str | os.PathLike[str] = CaptureConfig.ring_folder) -> Facts:
        """Measure memory, codecs and the drive, in some ten seconds; with ``quick`` less well, in about one.

        Codecs are measured on tensors of the newest checkpoint. It writes some hundred MB into a file inside the store
        and removes it; what a kill leaves of it, :meth:`gc` removes. Checkpoints are left as they are.

        Raises:
            OutOfSpaceError: there is too little room to measure in.
            ReadOnlyStoreError, StorageError: the store cannot be written.
        """
        tier = self._nvme
        tier.check_writable()
        found = sample(tier, _QUICK_SAMPLE_BYTES if quick else _SAMPLE_BYTES)
        if found is None or not found.samples:
            samples, described = noise_samples(_QUICK_SAMPLE_BYTES if quick else _SAMPLE_BYTES), NOISE
        else:
            samples, described = found.samples, f"step {found.ref.step} of run {found.run}"
        state_bytes = None if found is None else found.state_bytes
        return measure(tier, samples, described, state_bytes, Path(ring_folder), quick=quick)
