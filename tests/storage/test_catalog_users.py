"""Test marks of the processes that use a catalog."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck.errors import LockTimeoutError
from asymcheck.storage.local_files import Files
from asymcheck.storage.nvme.catalog import CatalogUsers


def test_one_process_has_one_mark_in_a_catalog(tmp_path: Path) -> None:
    """Test that LMDB is not opened twice in a process, for example by two paths to one directory."""
    folder = tmp_path / "open"
    first, second = CatalogUsers(Files(), folder), CatalogUsers(Files(), folder)
    first.put()
    with pytest.raises(LockTimeoutError, match="has opened the store by another path"):
        second.put()
    first.take_back()
    second.put()
    second.take_back()
    assert list(folder.iterdir()) == []


def test_a_mark_that_was_left_counts_as_dead(tmp_path: Path) -> None:
    """Test the mark of a process in which a commit failed, seen by the same process before and after the next mark."""
    folder = tmp_path / "open"
    first, second = CatalogUsers(Files(), folder), CatalogUsers(Files(), folder)
    first.put()
    first.take_back(as_if_killed=True)
    left = list(folder.iterdir())
    assert len(left) == 1
    assert second.other_marks() == (left, {})
    second.put()
    assert second.other_marks() == ([], {})
    second.take_back()
    assert list(folder.iterdir()) == []
