"""Test the wheel and the sdist as a user installs them, and the types that a user's program sees."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, run

tomllib = pytest.importorskip("tomllib")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]

CONSUMER = Path(__file__).with_name("consumer.py")
NOT_IN_ALL = {"all", "bench", "bench-zipnn", "demo", "dev", "docs", "deepspeed", "ray"}
"""Extras for the development of asymcheck; DeepSpeed, which needs a flag of pip; and Ray, which is large."""


def package_files() -> set[str]:
    """Return the files of the package in this repository."""
    files = (path for path in (ROOT / "asymcheck").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_has_exactly_the_package(wheel: Path) -> None:
    """Test the names of all files: modules, types and the files of the page."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == package_files()
    assert {"asymcheck/py.typed", "asymcheck/__init__.pyi", "asymcheck/view/page.html"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


def test_sdist_has_the_package_and_what_builds_it(sdist: Path) -> None:
    """Test that the sdist has the sources, and nothing from elsewhere."""
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    generated = {"PKG-INFO", "setup.cfg", *(name for name in names if name.startswith("asymcheck.egg-info/"))}
    assert names - generated == package_files() | {"pyproject.toml", "README.md", "LICENSE"}


def test_installed_wheel_saves_loads_and_exports(environment: Path, tmp_path: Path) -> None:
    """Test the command and the library outside of the repository."""
    python, command = environment / "bin" / "python", environment / "bin" / "asymcheck"
    script = (
        "import asymcheck, torch\n"
        "with asymcheck.Store.open('store', create=True) as store:\n"
        "    store.save({'weight': torch.arange(9.0)}, step=3, metrics={'loss': 1.0})\n"
        "    assert torch.equal(store.load()['weight'], torch.arange(9.0))\n"
        "print(asymcheck.__file__)\n"
    )
    assert Path(run(python, "-c", script, cwd=tmp_path).strip()).is_relative_to(environment)
    assert "view" in run(command, "--help", cwd=tmp_path)
    assert "report.html" in run(command, "view", "store", "--export", "report.html", cwd=tmp_path)
    assert "<main" in (tmp_path / "report.html").read_text("utf-8")


def test_extras_are_documented_and_all_has_those_of_users() -> None:
    """Test the extra `all`, and the table of extras in docs/getting-started.md."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (alias,) = extras["all"]
    assert set(re.fullmatch(r"asymcheck\[(.*)\]", alias)[1].split(",")) == set(extras) - NOT_IN_ALL  # type: ignore[index]  # a match
    text = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    documented = {"all", "deepspeed", "ray"} | set(extras) - NOT_IN_ALL
    assert [name for name in documented if f"| `{name}` |" not in text] == []


def test_consumer_passes_mypy(environment: Path, tmp_path: Path) -> None:
    """Test a user's program against the types of the installed wheel."""
    shutil.copy(CONSUMER, tmp_path)
    executable = f"--python-executable={environment / 'bin' / 'python'}"
    # The analysis of torch takes half a minute of processor time.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    words = ("-m", "mypy", executable)
    assert "Success" in run(sys.executable, *words, "consumer.py", cwd=tmp_path)
    wrong = CONSUMER.read_text("utf-8").replace("latest: int | None", "latest: str")
    (tmp_path / "wrong.py").write_text(wrong, "utf-8")
    with pytest.raises(AssertionError, match=r"int \| None"):
        run(sys.executable, *words, "wrong.py", cwd=tmp_path)


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is missing: pip install pyright")
def test_consumer_passes_pyright(environment: Path, tmp_path: Path) -> None:
    """Test a user's program with another type checker."""
    shutil.copy(CONSUMER, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "reportUnknownMemberType": false}')
    assert "0 errors" in run("pyright", "--pythonpath", environment / "bin" / "python", "consumer.py", cwd=tmp_path)
