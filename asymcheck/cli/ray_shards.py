"""Run the shards of a command as tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from asymcheck.errors import AsymcheckError, InvalidInputError, StorageError
from asymcheck.fsck.verify import Shard
from asymcheck.types import Progress

_R = TypeVar("_R")
_RETRIES = 3


def run_on_ray(call: Callable[[Shard], _R], count: int | None, progress: Progress) -> list[_R]:
    """Return ``call(shard)`` for each of ``count`` shards, by default one for each CPU of the cluster.

    The cluster is the one that RAY_ADDRESS names, or that runs on this machine, or else a new one on this machine. Ray
    starts a shard again, up to three times, if its worker or its machine is lost.

    ``call`` is a function of this package, or a partial of one. ``progress`` is called with the number of complete
    shards, and of all shards.

    Raises:
        InvalidInputError: Ray is not installed, or has no such cluster.
        StorageError: the cluster lost the worker of a shard again and again, or a worker cannot import asymcheck.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise InvalidInputError("--on ray needs Ray; pip install 'asymcheck[ray]'") from error
    # Ray reports lost workers on the standard output, where --json prints one document.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InvalidInputError(f"cannot connect to a Ray cluster: {error}; check RAY_ADDRESS") from error
        try:
            return _run_all(ray, call, count, progress)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, AsymcheckError):
                raise cause from None
            reason = str(error).strip().splitlines()[-1]
            raise StorageError(
                f"a shard failed on the Ray cluster: {reason}. Check that all its machines have this version of "
                "asymcheck and enough memory, and try again"
            ) from error
        finally:
            ray.shutdown()


def _run_all(ray: Any, call: Callable[[Shard], _R], count: int | None, progress: Progress) -> list[_R]:  # noqa: ANN401 - as above
    count = count or max(1, int(ray.cluster_resources().get("CPU", 1)))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run)
    shards = [task.remote(call, Shard(index, count)) for index in range(count)]
    running = shards
    while running:
        progress(count - len(running), count)
        done, running = ray.wait(running)
        ray.get(done)  # raises the error of a shard at once
    return list(ray.get(shards))


def _run(call: Callable[[Shard], _R], shard: Shard) -> _R:
    return call(shard)
