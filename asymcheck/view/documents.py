"""Documents of the page: those that the command line prints with ``--json``, for one store."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from asymcheck.errors import AsymcheckError, CheckpointNotFoundError, InvalidInputError
from asymcheck.inspect.documents import jsonable
from asymcheck.inspect.history import History, Known, read_history
from asymcheck.storage.remote import is_uri
from asymcheck.store import Store
from asymcheck.view.trace_summary import TraceFile

DocumentOf = Callable[..., object]
"""Returns the document that ``asymcheck COMMAND --json`` prints, for the name of the command and all its options."""
Query = Mapping[str, str]

_LOCAL_INTERVAL_S, _REMOTE_INTERVAL_S = 1.0, 20.0
_SIDE = re.compile(r"(save:)?[0-9a-f]{1,32}\Z")


@dataclasses.dataclass(frozen=True)
class RunState:
    """State of a run, from names of files."""

    run: str
    version: int
    """A number that changes with the checkpoints or generations of the run."""
    checkpoints: int
    read: int
    """Number of complete checkpoints whose manifests were read. A slow first read shows its progress here."""
    newest_step: int | None


class Histories:
    """Histories of all runs of one store or remote location. Threads may share it."""

    def __init__(self, store: Store, interval_s: float) -> None:
        """Follow ``store``, and list its folders at most once in ``interval_s`` seconds."""
        self._tier = store.resources.tier
        self._interval_s = interval_s
        self._known: dict[str, Known] = {}
        self._read: dict[str, tuple[int, History]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._listing = threading.Lock()
        self._listed_s = -interval_s
        self._states: list[RunState] = []

    def states(self) -> list[RunState]:
        """Return the state of each run."""
        with self._listing:
            if time.monotonic() - self._listed_s >= self._interval_s:
                self._states = [self._state(run) for run in self._tier.manifests.runs()]
                self._listed_s = time.monotonic()
        return [dataclasses.replace(state, read=len(self._known.get(state.run, ()))) for state in self._states]

    def _state(self, run: str) -> RunState:
        manifests, known = self._tier.manifests, self._known.setdefault(run, {})
        refs, heads = manifests.refs(run), manifests.heads(run)
        # Manifests of other ranks may complete a checkpoint later.
        incomplete = [ref for ref in refs if ref not in known] if run in self._read else []
        present = tuple(manifests.listing(run, ref).manifests for ref in incomplete)
        version = hash((tuple(refs), tuple(heads), present))
        newest = max(refs, key=lambda ref: ref.save_id, default=None)
        return RunState(run, version & 0xFFFFFFFF, len(refs), 0, None if newest is None else newest.step)

    def history(self, run: str) -> History:
        """Return the history of a run with all its checkpoints.

        Raises:
            CheckpointNotFoundError: the store has no such run.
        """
        version = next((state.version for state in self.states() if state.run == run), None)
        if version is None:
            raise CheckpointNotFoundError(f"store {self._tier.root} has no run {run!r:.100}; reload the page")
        with self._locks.setdefault(run, threading.Lock()):
            before = self._read.get(run)
            if before is None or before[0] != version:
                history = read_history(self._tier, run, everything=True, known=self._known[run])
                self._read[run] = version, history
            return self._read[run][1]


class Documents:
    """Documents of one store, by name. Threads may share it."""

    def __init__(
        self, store: str, remote: str | None, ring_folder: Path, trace: Path | None, document_of: DocumentOf
    ) -> None:
        """Open the store at a path or URI; ``remote`` is the URI of the location to which it is pushed.

        Raises:
            StoreNotFoundError, FormatError, RemoteUnreachableError: as :meth:`asymcheck.Store.open`.
        """
        self._location, self._uri, self._ring_folder, self._document_of = store, remote, ring_folder, document_of
        self._store = Store.open(store, read_only=True)
        self._histories = Histories(self._store, _REMOTE_INTERVAL_S if is_uri(store) else _LOCAL_INTERVAL_S)
        self._remote: Store | None = None
        self._remote_histories: Histories | None = None
        self._remote_lock = threading.Lock()
        self._trace = None if trace is None else TraceFile(trace)
        # One command that reads tensors at a time, so that the page does not compete with a training for the drive.
        # Other documents are read without the lock, so that the page follows the store during a verification.
        self._heavy = threading.Lock()
        self._verified: dict[str, object] | None = None
        self._by_name: dict[str, Callable[[Query], object]] = {
            "state": lambda _query: self._state(),
            "log": lambda query: self._log(self._location, self._histories, query),
            "remote": self._remote_log,
            "memory": lambda _query: self._memory(),
            "du": lambda _query: document_of("du", store=store, run=None),
            "verify": lambda _query: self._verify(),
            "diff": self._diff,
            "trace": self._trace_window,
        }

    def get(self, name: str, query: Query) -> object | None:
        """Return a document for ``json.dumps``, or None if there is none with this name.

        Raises:
            AsymcheckError: the document cannot be computed; the message is for the user.
        """
        compute = self._by_name.get(name)
        return None if compute is None else jsonable(compute(query))

    def collect(self, *, verify: bool, compare: tuple[str, str, str] | None) -> dict[str, object]:
        """Return the documents of a static page, by name; those of runs, by name and run.

        A document that cannot be computed is replaced by ``{"error": message}``, except a verification and a
        comparison. With ``verify``, also read and check every byte. ``compare`` has run, A and B of a comparison, as in
        :meth:`asymcheck.Store.diff`.

        Raises:
            AsymcheckError: the verification failed, or the checkpoints of ``compare`` cannot be compared.
        """

        def get(name: str, **query: str) -> object:
            try:
                return self.get(name, query)
            except AsymcheckError as error:
                return {"error": str(error)}

        if verify:
            self._verify()
        runs = [state.run for state in self._histories.states()]
        remote_runs = [] if self._uri is None else runs
        return {
            "state": get("state"),
            "log": {run: get("log", run=run) for run in runs},
            "remote": {run: get("remote", run=run) for run in remote_runs},
            "memory": get("memory"),
            "du": get("du"),
            "diff": None if compare is None else self.get("diff", dict(zip(("run", "a", "b"), compare, strict=True))),
            "trace": None if self._trace is None else get("trace"),
        }

    def close(self) -> None:
        """Close the store and the remote location."""
        self._store.close()
        if self._remote is not None:
            self._remote.close()

    def _read(self, command: str, **options: object) -> object:
        with self._heavy:
            return self._document_of(command, store=self._location, **options)

    def _state(self) -> object:
        return {
            "store": self._store.location,
            "is_remote": is_uri(self._location),
            "remote": self._uri,
            "runs": self._histories.states(),
            "verified": self._verified,
            "trace": None if self._trace is None else self._trace.version(),
            "now_ns": time.time_ns(),
        }

    @staticmethod
    def _log(name: str, histories: Histories, query: Query) -> object:
        return {"store": name, "history": histories.history(query.get("run", "")), "remote": None, "there": None}

    def _remote_log(self, query: Query) -> object:
        if self._uri is None:
            raise InvalidInputError("the page has no remote location; start asymcheck view with --remote URI")
        with self._remote_lock:
            if self._remote_histories is None:
                self._remote = Store.open(self._uri, read_only=True)
                self._remote_histories = Histories(self._remote, _REMOTE_INTERVAL_S)
        return self._log(self._uri, self._remote_histories, query)

    def _memory(self) -> object:
        of_tensors = {"step": None, "pattern": None, "values": False, "where": False}
        of_rings = {"run": None, "tier": "memory", "ring_folder": self._ring_folder}
        return self._document_of("inspect", store=self._location, remote=None, follows=False, **of_rings, **of_tensors)

    def _verify(self) -> object:
        started_ns = time.time_ns()
        document = self._read("verify", run=None, step=None, repair=False, remote=None, deep=True, shard=None)
        self._verified = {"started_ns": started_ns, "ended_ns": time.time_ns(), "document": document}
        return self._verified

    def _diff(self, query: Query) -> object:
        sides = [query.get(side, "") for side in ("a", "b")]
        if not all(map(_SIDE.match, sides)):
            raise InvalidInputError("choose two steps: a number, or save:DIGITS for one save of a step")
        run, tensors = query.get("run", "default"), query.get("tensors") or "*"
        norms = query.get("norms") != "no"
        return self._read("diff", a=sides[0], b=sides[1], run=run, pattern=tensors, norms=norms)

    def _trace_window(self, query: Query) -> object:
        if self._trace is None:
            raise InvalidInputError("the page has no trace; start asymcheck view with --trace FILE")
        try:
            start, end = float(query.get("from", 0)), float(query["to"]) if "to" in query else None
        except ValueError as error:
            raise InvalidInputError("from and to are times in milliseconds") from error
        return self._trace.summary(start, end)
