"""Memory that this process may still allocate: free memory of the machine, limited by cgroups.

Pages of a ring count in every cgroup of the process. The kernel kills a process that exceeds a limit. Above the softer
limit ``memory.high``, the kernel stops the process again and again to free pages, but pages of a ring cannot be freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = Path("sys/fs/cgroup")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return how many bytes this process may still allocate; None if the system does not say.

    ``root`` is the folder that contains ``proc`` and ``sys``.
    """
    return min([*_machine_bytes(root), *_cgroup_bytes(root)], default=None)


def _machine_bytes(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        yield int(available.split()[1]) * 1024


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes available in each cgroup (v1 or v2) of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            for mount in (root / _CGROUPS, root / _CGROUPS / "unified"):
                for limit in ("memory.max", "memory.high"):
                    yield from _hierarchy_bytes(mount, path, limit, "memory.current", "")
        elif "memory" in controllers.split(","):
            mount = root / _CGROUPS / "memory"
            yield from _hierarchy_bytes(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _hierarchy_bytes(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    # Inside a container, the path may be that of the host. Then only the mount exists: the group of the container.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:count])
        # ValueError: "max" means no limit. A parent group may have a limit.
        with contextlib.suppress(OSError, ValueError):
            unused = int((group / limit).read_text()) - int((group / usage).read_text())
            yield max(0, unused + _reclaimable(group / "memory.stat", prefix))


def _reclaimable(statistics: Path, prefix: str) -> int:
    """Return the page cache of a group, which the kernel frees on demand. Pages of a ring are not page cache."""
    fields = {f"{prefix}inactive_file", f"{prefix}active_file"}
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split() for line in statistics.read_text().splitlines()]
        return sum(int(line[1]) for line in lines if len(line) > 1 and line[0] in fields)
    return 0
