"""Available memory: what the machine has left, and the groups of processes in which a container or a job puts this one.

Pages of a ring count in all of these groups. The kernel kills a process that exceeds the limit of one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_GROUPS = Path("sys/fs/cgroup")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return how much more memory this process may take; None where nothing says so.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    return min([*_of_machine(root), *_of_groups(root)], default=None)


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        yield int(available.split()[1]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what each group leaves that this process is in, whichever version of them it is."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            for mount in (root / _GROUPS, root / _GROUPS / "unified"):
                yield from _of_path(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _of_path(
                root / _GROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            )


def _of_path(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    # Inside a container the path may be the one outside, of which nothing is here but the mount: its own group.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:count])
        # ValueError: "max" is none. A group without a limit may lie in one that has it.
        with contextlib.suppress(OSError, ValueError):
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            yield max(0, left + _droppable(group / "memory.stat", prefix))


def _droppable(statistics: Path, prefix: str) -> int:
    """Return the bytes of a group in the page cache, which the kernel drops on demand. Pages of a ring do not count."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split() for line in statistics.read_text().splitlines()]
        return sum(int(line[1]) for line in lines if len(line) > 1 and line[0] in wanted)
    return 0
