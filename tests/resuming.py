"""Pytest plugin: leave out the tests that have passed before, so that an interrupted `make long` continues.

Load it with ``-p tests.resuming --passed FILE``. The file begins again when the code changes.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--passed", required=True, type=Path, help="file with the tests that have passed before")


def code_id(root: Path) -> str:
    """Return a digest of the tracked files and their changes, without the documentation."""
    code = ["--", ".", ":!docs", ":!*.md"]
    commands = (["git", "ls-files", "--stage", *code], ["git", "diff", "HEAD", *code])
    texts = (subprocess.check_output(command, cwd=root) for command in commands)
    return hashlib.sha256(b"".join(texts)).hexdigest()


class Passed:
    """The node ids in the file, of this and earlier runs with the same code."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the file, or begin a new one. A worker of xdist gets the node ids from the main process."""
        self._path: Path = config.getoption("--passed")
        self._called: set[str] = set()
        self._is_worker = hasattr(config, "workerinput")
        if self._is_worker:
            self.before: list[str] = config.workerinput["passed"]
            return
        begin = f"code {code_id(config.rootpath)}"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        if lines[:1] != [begin]:
            lines = [begin]
            self._path.write_text(f"{begin}\n")
        self.before = lines[1:]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Send the node ids to a worker, so that all workers collect the same tests."""
        node.workerinput["passed"] = self.before

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests that have passed."""
        before = set(self.before)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test that has passed, including its teardown."""
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._called and not self._is_worker:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Report success if all tests have passed before."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.before:
            session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin with its state."""
    config.pluginmanager.register(Passed(config))
