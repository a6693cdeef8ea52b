"""Describe the machine and the software of a measurement."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import asymcheck
from asymcheck.storage.nvme.drives import file_system_type


def describe(folder: Path) -> dict[str, str]:
    """Return the facts that are needed to interpret a figure measured in ``folder``."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "asymcheck": f"{asymcheck.__version__} ({commit.stdout.strip() or 'no commit'})",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "peers": ", ".join(f"{name} {metadata.version(name)}" for name in ("safetensors", "torchsnapshot")),
        "processor": f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "tensors": f"in {'huge' if os.environ.get('THP_MEM_ALLOC_ENABLE') == '1' else 'small'} pages",
        "kernel": platform.release(),
        "file system": file_system_type(folder),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
