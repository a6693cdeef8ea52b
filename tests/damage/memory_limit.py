"""Limit the memory of a child."""

import resource
from pathlib import Path


def limit_memory(extra_bytes: int) -> None:
    """Limit new mappings of the calling child to ``extra_bytes``; further allocations fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def unlimit_memory() -> None:
    """Undo :func:`limit_memory`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
