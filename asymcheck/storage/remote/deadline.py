"""Deadlines and retries for operations of remote clients, which cannot be cancelled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from asymcheck.config import RemoteConfig
from asymcheck.errors import RemoteUnreachableError
from asymcheck.executor import begin

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)
_QUIET_S = 5.0
"""Time after which a missing answer is reported."""


def within(seconds: float, action: str, call: Callable[[], _T]) -> _T:
    """Run ``call`` on a separate thread and return its result, or raise its exception.

    After a timeout, the thread ends with the process. Its late writes are harmless, because they go to temporary
    names. It renames only complete files.

    Raises:
        RemoteUnreachableError: the call took longer than ``seconds``.
    """
    done = begin(call, "remote")
    try:
        if not wait([done], min(seconds, _QUIET_S)).done and seconds > _QUIET_S:
            _logger.warning("%s: no answer for %g s; waiting up to %.3g s", action, _QUIET_S, seconds)
        if not wait([done], max(0, seconds - _QUIET_S)).done:
            raise RemoteUnreachableError(f"{action}: no answer in {round(seconds, 3):g} s")
        return done.result()
    finally:
        # Break the reference cycle between this frame and the error, which would keep the objects of the call alive.
        del done


def tried(config: RemoteConfig, call: Callable[[float], _T]) -> _T:
    """Call ``call`` with a timeout in seconds, and retry transient failures until the deadline.

    Each attempt but the last gets half of the remaining time, so that a hanging connection leaves time for others.

    Raises:
        RemoteUnreachableError: the last attempt failed.
    """
    ends, remaining_s, number = time.monotonic() + config.deadline_s, config.deadline_s, 1
    while True:
        try:
            return call(remaining_s if number == config.attempts else remaining_s / 2)
        except RemoteUnreachableError as error:
            pause_s = config.retry_s * 2 ** (number - 1)
            remaining_s = ends - time.monotonic() - pause_s
            if number >= config.attempts or remaining_s <= 0:
                if number == 1:
                    raise
                raise RemoteUnreachableError(f"{error}; attempt {number} of {config.attempts}") from error
            _logger.warning("%s; trying again", error)
        time.sleep(pause_s)
        number += 1
