"""Test that network file systems are detected by their mounts."""

from pathlib import Path

import pytest

from asymcheck.errors import UnsupportedFileSystemError
from asymcheck.storage.nvme.drives import NETWORK, file_system_type, refuse_network


def _mount(point: str, kind: str, options: str = "shared:1") -> str:
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in point)
    return f"36 35 98:0 /root {escaped} rw,noatime {options} - {kind} /dev/source rw,errors=continue"


def _table(*mounts: str) -> str:
    return "\n".join([_mount("/", "ext4"), _mount("/proc", "proc", ""), *mounts]) + "\n"


@pytest.mark.parametrize("kind", sorted(NETWORK))
def test_every_network_file_system_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Test that the error names the type of the file system."""
    with pytest.raises(UnsupportedFileSystemError, match=rf"\({kind}\)"):
        refuse_network(tmp_path, _table(_mount(str(tmp_path), kind)))


@pytest.mark.parametrize("kind", ["fuse.ceph-fuse", "fuse.daos", "fuse.rclone", "fuse.seaweedfs"])
def test_network_file_systems_in_user_space_are_refused(tmp_path: Path, kind: str) -> None:
    """Test the types that the kernel lists, which may differ from the type in a mount command."""
    with pytest.raises(UnsupportedFileSystemError, match=rf"\({kind}\)"):
        refuse_network(tmp_path, _table(_mount(str(tmp_path), kind)))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "fuse.fuse-overlayfs"])
def test_local_file_systems_are_fine(tmp_path: Path, kind: str) -> None:
    """Test local file systems, including file systems in memory and of containers."""
    refuse_network(tmp_path, _table(_mount(str(tmp_path), kind)))
    assert file_system_type(tmp_path, _table(_mount(str(tmp_path), kind))) == kind


def test_the_longest_mount_point_counts(tmp_path: Path) -> None:
    """Test mounts listed in any order, and a directory with a similar name."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "inner2").mkdir()
    outer = _mount(str(tmp_path), "nfs4")
    for mounts in ([outer, _mount(str(inner), "ext4")], [_mount(str(inner), "ext4"), outer]):
        assert file_system_type(inner, _table(*mounts)) == "ext4"
        assert file_system_type(inner / "not" / "there", _table(*mounts)) == "ext4"
        assert file_system_type(tmp_path / "inner2", _table(*mounts)) == "nfs4"


def test_a_later_mount_hides_an_earlier_one_at_the_same_point(tmp_path: Path) -> None:
    """Test that the last mount at a mount point counts."""
    table = _table(_mount(str(tmp_path), "nfs4"), _mount(str(tmp_path), "xfs"))
    assert file_system_type(tmp_path, table) == "xfs"


NAMES = ["with space", "tab\tand\nnewline", "back\\slash", "größe", "値", "\\040", "a - b", "\x0b\x85\xa0", "\udcff"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_mount_points_of_any_name_are_found(tmp_path: Path, name: str) -> None:
    """Test escaped spaces, other letters, and names that are not valid text."""
    point = tmp_path / name
    point.mkdir()
    table = _table(_mount(str(point), "nfs"))
    assert file_system_type(point / "store", table) == "nfs"
    assert file_system_type(tmp_path, table) == "ext4"


def test_link_is_resolved(tmp_path: Path) -> None:
    """Test that the directory behind a link counts."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    table = _table(_mount(str(tmp_path / "real"), "lustre"))
    assert file_system_type(tmp_path / "link" / "store", table) == "lustre"


def test_optional_fields_do_not_confuse(tmp_path: Path) -> None:
    """Test no, one and several optional fields."""
    for options in ("", "shared:1", "shared:1 master:2 propagate_from:3 unbindable"):
        assert file_system_type(tmp_path, _table(_mount(str(tmp_path), "nfs", options))) == "nfs"


def test_this_machine_has_a_table_that_can_be_read(tmp_path: Path) -> None:
    """Test the mount table of this machine with a real directory."""
    assert file_system_type(tmp_path) != ""
    assert file_system_type(Path("/proc")) == "proc"
    refuse_network(tmp_path)
