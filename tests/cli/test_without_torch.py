"""Test that commands that create no tensors do not import torch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote import REPOSITORY

CALL = """
import json, sys
from asymcheck.cli.main import commands
for words in json.loads(sys.argv[1]):
    try:
        status = commands.main(words, "asymcheck", standalone_mode=False)
    except SystemExit as ended:
        status = ended.code
    if status or "torch" in sys.modules:
        sys.exit(f"{words}: status {status}, torch was imported: {'torch' in sys.modules}")
"""


@pytest.mark.slow
def test_commands_without_tensors_need_no_torch(store: Path, tmp_path: Path) -> None:
    """Test the imported modules. Only exports and GPU measurements import torch."""
    there = f"file://{tmp_path}/there"
    words = [
        ["--help"],
        ["restore", "--help"],
        ["convert", "--help"],
        ["merge", "--help"],
        ["completion", "bash"],
        ["inspect", store],
        ["inspect", store, "--step", 10, "--where"],
        ["inspect", store, "--step", 10, "--values"],
        ["inspect", store, "--tier", "memory"],
        ["log", store],
        ["du", store],
        ["verify", store],
        ["verify", store, "--repair"],
        ["diff", store, 10, 20],
        ["push", store, there],
        ["inspect", store, "--remote", there],
        ["view", store, "--remote", there, "--export", tmp_path / "report.html", "--verify", "--compare", 10, 20],
        ["verify", there],
        ["delete", store, 1, "--run", "other", "--yes"],
        ["gc", store, "--keep-last", 1],
        ["rebuild-catalog", store],
        ["pull", there, tmp_path / "back"],
    ]
    called = [sys.executable, "-c", CALL, json.dumps([[str(word) for word in one] for one in words])]
    done = subprocess.run(called, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
