"""Test Hadoop's own client, whose JVM runs in a separate process, with the contract of clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.remote.conftest import CLIENT, CLUSTER
from tools import libhdfs
from tools.local_hdfs import LocalHdfs

ROOT = Path(__file__).parents[2]
SUITES = ("test_remote_files.py", "test_round_trip.py::test_push_and_pull_of_the_newest")


@pytest.mark.slow
@pytest.mark.skipif(CLIENT in os.environ, reason="this is that process")
@pytest.mark.skipif(libhdfs.java_home() is None, reason="libhdfs is built with a JDK's headers, and there are none")
def test_hadoops_own_client_keeps_the_contract(hdfs: LocalHdfs) -> None:
    """Test ranges, listings, existing names, renames, and complete checkpoints, as for hdfs-native."""
    home = libhdfs.java_home()
    assert home is not None
    environment = {**os.environ, **libhdfs.environment(hdfs, home), CLUSTER: hdfs.url, CLIENT: "libhdfs"}
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "hdfs"]
    command = [sys.executable, "-m", "pytest", *words, *(f"tests/remote/{suite}" for suite in SUITES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10
