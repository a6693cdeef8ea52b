"""Test that available memory is limited by the container and by the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck import measurement
from asymcheck.capture import background_saver
from asymcheck.storage.available_memory import available_bytes

GIB = 1 << 30
MACHINE = f"MemTotal: 999 kB\nMemAvailable: {512 * GIB // 1024} kB\n"


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, text in {"proc/meminfo": MACHINE, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ({}, 512 * GIB),
        ({"": ("max", 3 * GIB)}, 512 * GIB),
        ({"": (32 * GIB, 12 * GIB)}, 20 * GIB),
        ({"pod/box": (32 * GIB, 12 * GIB), "pod": ("max", 40 * GIB), "": ("max", 90 * GIB)}, 20 * GIB),
        ({"pod/box": ("max", 12 * GIB), "pod": (48 * GIB, 40 * GIB)}, 8 * GIB),
        ({"pod/box": ("what", 12 * GIB), "pod": (48 * GIB, "?")}, 512 * GIB),
        ({"pod": (32 * GIB, 40 * GIB)}, 0),
        ({"other": (32 * GIB, 31 * GIB)}, 512 * GIB),
    ],
)
@pytest.mark.parametrize(
    ("line", "mount", "limit", "usage"),
    [
        ("0::/pod/box", "sys/fs/cgroup", "memory.max", "memory.current"),
        ("0::/pod/box", "sys/fs/cgroup", "memory.high", "memory.current"),
        ("0::/pod/box", "sys/fs/cgroup/unified", "memory.max", "memory.current"),
        ("0::/../pod/box", "sys/fs/cgroup", "memory.max", "memory.current"),
        ("4:cpu,memory:/pod/box\n0::/", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_least_of_all_groups_counts(
    tmp_path: Path,
    groups: dict[str, tuple[object, object]],
    left: int,
    line: str,
    mount: str,
    limit: str,
    usage: str,
) -> None:
    """Test that every parent group may have a limit, or none."""
    files: dict[str, object] = {"proc/self/cgroup": f"1:name=systemd:/x\n{line}"}
    for group, (most, used) in groups.items():
        files |= {f"{mount}/{group}/{limit}": most, f"{mount}/{group}/{usage}": used}
    assert available_bytes(_write(tmp_path, files)) == left


@pytest.mark.parametrize(
    ("line", "mount", "names", "prefix"),
    [
        ("0::/", "sys/fs/cgroup", ("memory.max", "memory.current"), ""),
        ("4:memory:/", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_files_that_were_read_take_nothing(
    tmp_path: Path, line: str, mount: str, names: tuple[str, str], prefix: str
) -> None:
    """Test that the page cache counts as free, because the kernel drops it on demand, and that rings do not."""
    statistics = f"{prefix}shmem {3 * GIB}\n{prefix}active_file {4 * GIB}\n{prefix}inactive_file {5 * GIB}\nodd"
    files = {"proc/self/cgroup": line, f"{mount}/memory.stat": statistics}
    files |= {f"{mount}/{name}": count * GIB for name, count in zip(names, (32, 31), strict=True)}
    assert available_bytes(_write(tmp_path, files)) == 10 * GIB


def test_nothing_is_known_where_nothing_says_so(tmp_path: Path) -> None:
    """Test systems without this information, such as systems other than Linux."""
    assert available_bytes(tmp_path) is None
    _write(tmp_path, {"proc/meminfo": "MemAvailable: many", "proc/self/cgroup": "nonsense\n::\n"})
    assert available_bytes(tmp_path) is None


def test_ring_takes_half_of_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test also a tiny container: the size is never zero, so that a too small ring is reported."""
    monkeypatch.setattr(measurement, "available_bytes", lambda: 1 << 20)
    assert background_saver.default_bytes(tmp_path, GIB) == min(measurement.ring_limits(tmp_path)) == 1 << 19
    assert background_saver.default_bytes(tmp_path, GIB, processes=2) == 1 << 18
    monkeypatch.setattr(measurement, "available_bytes", lambda: 0)
    assert background_saver.default_bytes(tmp_path, GIB) > 0
