"""Deadlines: an operation that does not end is left behind, because no client can be made to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from asymcheck.config import RemoteConfig
from asymcheck.errors import RemoteUnreachableError
from asymcheck.executor import begin

_T = TypeVar("_T")


def within(seconds: float, what: str, call: Callable[[], _T]) -> _T:
    """Call ``call`` on a thread of its own and return what it returns, or raise what it raises.

    A thread that is left behind ends with the process. Its late effects do no harm: it writes under temporary
    names, and gives a file its name only when that is complete.

    Raises:
        RemoteUnreachableError: it took longer than ``seconds``.
    """
    done = begin(call, "remote")
    try:
        if not wait([done], seconds).done:
            raise RemoteUnreachableError(f"{what}: no answer in {round(seconds, 3):g} s")
        return done.result()
    finally:
        # The error knows this frame, which must not know it: what the call held would stay until garbage is collected.
        del done


def tried(config: RemoteConfig, call: Callable[[float], _T]) -> _T:
    """Call ``call`` with the seconds it has, and again after a failure that may pass, until the deadline.

    All but the last have half of what is left: a connection that never answers is no reason to ask nobody else.

    Raises:
        RemoteUnreachableError: as ``call`` raised it last.
    """
    ends, left_s, number = time.monotonic() + config.deadline_s, config.deadline_s, 1
    while True:
        try:
            return call(left_s if number == config.attempts else left_s / 2)
        except RemoteUnreachableError as error:
            pause_s = config.retry_s * 2 ** (number - 1)
            left_s = ends - time.monotonic() - pause_s
            if number >= config.attempts or left_s <= 0:
                if number == 1:
                    raise
                raise RemoteUnreachableError(f"{error}; attempt {number} of {config.attempts}") from error
        time.sleep(pause_s)
        number += 1
