"""Test the tear detection of the training thread beside that of the capture thread."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from asymcheck.capture.device_copy import Devices, Transfers
from asymcheck.capture.tear_detection import SourceDigests, TearDetector
from asymcheck.errors import CaptureWarning

COUNT = 3_000


@pytest.fixture(autouse=True)
def _threads_alternate_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class ChangedLate(SourceDigests):
    """Source digests of a capture in which a device found a changed tensor after the fence."""

    def __init__(self, name: str) -> None:
        """Find this tensor."""
        super().__init__([], [], Transfers(Devices(0), [], []), [])
        self._name = name

    def late(self) -> list[str]:
        """Return its name."""
        return [self._name]


def test_one_thread_may_find_changes_while_the_other_one_reads_them() -> None:
    """Test a capture thread that finds changed tensors, and a training thread that looks at suspects and warns."""
    detector = TearDetector("sampled")
    open_capture = ChangedLate("last")
    failures: list[BaseException] = []

    def find() -> None:
        try:
            for number in range(COUNT):
                open_capture.unseen.add(number)
                detector.fence(ChangedLate(f"tensor {number}"))
                detector.verdict(ChangedLate("next"), number)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=find)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        thread.start()
        while thread.is_alive():
            detector.settle()
            detector.fence(open_capture)
        thread.join()
    assert not failures
    assert caught
    assert len(detector.changing) == COUNT + 1
