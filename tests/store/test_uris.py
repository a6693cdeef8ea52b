"""Test URIs of stores: incomplete ones, and ones that were converted to paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.errors import InvalidInputError


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("gopher://host/x", "no file system is known for gopher://"),
        ("hdfs:///x", "name the NameNode"),
        ("hdfs://host", "below the root"),
        ("file://host/x", "three slashes"),
        ("file:///x?dfs.replication=2", "no option"),
        ("file:///x/../y", "below the root"),
        ("file:///x//y", "without .. and //"),
    ],
)
def test_uris_that_say_too_little_are_refused(location: str, reason: str) -> None:
    """Test that no incomplete URI is used as a relative path."""
    with pytest.raises(InvalidInputError, match=reason):
        Store.open(location, create=True)


@pytest.mark.parametrize("location", ["hdfs://namenode:8020/x", "file:///x", "s3://bucket/x", "no-such-scheme://x"])
def test_a_uri_that_was_made_a_path_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    """Test a URI that lost a slash as a path, which would create a directory called ``hdfs:``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="is a URI"):
        Store.open(Path(location))
    assert list(tmp_path.iterdir()) == []
    Store.open(tmp_path / "hdfs:" / "x", create=True).close()
    assert (tmp_path / "hdfs:" / "x" / "asymcheck.store").exists()
