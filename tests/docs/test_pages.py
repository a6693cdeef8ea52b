"""Test that README and the pages of docs/ show the actual output, and that a wrong page is detected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, PageError, Warm, blocks_of, normal, pages, run_page

LINK = re.compile(r"\[[^\]]*\]\((?!https?://)([^)#]+)[^)]*\)")
COMMANDS = (
    *("completion", "convert", "delete", "diff", "doctor", "du", "gc", "inspect", "log"),
    *("merge", "merge-reports", "publish", "pull", "push", "rebuild-catalog", "restore", "subscribe", "verify", "view"),
)


TRAINERS = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "lightning.pytorch")
"""Modules that take seconds to import."""
USES_TRAINERS = re.compile(r"^(?:import|from) (?:transformers|lightning)\b", re.MULTILINE)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Return the prepared process, which most pages share."""
    with Warm(tmp_path_factory.mktemp("warm")) as prepared:
        yield prepared


@pytest.fixture(scope="module")
def warm_trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Return the prepared process of the pages that use trainers."""
    with Warm(tmp_path_factory.mktemp("warm"), *TRAINERS) as prepared:
        yield prepared


@pytest.mark.slow(quick=["README", "concepts", "failure-model"])
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_page_shows_the_actual_output(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Test every block in a new folder, and every output."""
    uses_trainers = USES_TRAINERS.search(page.read_text())
    warm = request.getfixturevalue("warm_trainers" if uses_trainers else "warm")
    _, problems = run_page(page.read_text(), warm, tmp_path)
    assert not problems, "\n".join(problems) + "\npython -m tests.docs.pages --update writes it into the page"


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Test that linked files of this repository exist."""
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_readme_trains_and_resumes() -> None:
    """Test two starts of README's loop; the second continues where the first ended."""
    blocks = blocks_of((ROOT / "README.md").read_text())
    loops = [block for block in blocks if block.file == "train.py"]
    assert len(loops) == 1
    assert "checkpointer.restore()" in loops[0].body
    shown = "".join(block.body for block in blocks if block.kind == "console")
    assert re.findall(r"\$ python train.py \d+\n(continued.*)", shown) == [
        "continued after None, saved step 44",
        "continued after 44, saved step 99",
    ]


def test_every_page_is_linked_from_readme() -> None:
    """Test that README leads to every page."""
    linked = LINK.findall((ROOT / "README.md").read_text())
    assert {f"docs/{page.name}" for page in pages()[1:]} <= set(linked)


def test_every_command_is_shown() -> None:
    """Test that docs/cli.md runs every command."""
    from asymcheck.cli.main import commands

    blocks = blocks_of((ROOT / "docs" / "cli.md").read_text())
    shown = "".join(block.body for block in blocks if block.kind == "console")
    assert set(commands.commands) == set(COMMANDS)
    for command in COMMANDS:
        assert f"$ asymcheck {command} " in shown, command


def test_every_error_is_explained() -> None:
    """Test that docs/failure-model.md names every error and warning of users, and has their base classes right."""
    from asymcheck import errors

    text = (ROOT / "docs" / "failure-model.md").read_text()
    names = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert [name for name in names if f"`{name}`" not in text] == []
    bases = (errors.AsymcheckError, errors.AsymcheckWarning)
    assert [name for name in names if not issubclass(vars(errors)[name], bases)] == []


@pytest.mark.parametrize(
    ("page", "place"),
    [
        ("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n", "the block"),
        ("```python\nprint('not shown')\n```\n", "the block"),
        ("```console\n$ echo right\nwrong\n```\n", "echo right"),
        (
            "```console\n$ asymcheck inspect nowhere\nasymcheck: nowhere does not exist; check the path\n```\n",
            "inspect nowhere",
        ),
        ("```console\n$ false\n```\n", "false"),
        ("```console\n$ echo 'state 12 MiB, 3 packs'\nstate 9 MiB, 4 packs\n```\n", "echo"),
        ("```console\n$ true\nthis is not printed\n```\n", "true"),
    ],
)
def test_a_wrong_output_is_noticed_and_put_right(page: str, place: str, warm: Warm, tmp_path: Path) -> None:
    """Test pages with wrong outputs, and the outputs that --update writes."""
    mended, problems = run_page(page, warm, tmp_path)
    assert len(problems) == 1
    assert place in problems[0]
    if "```output" in page or "```console" in page:
        assert run_page(mended, warm, tmp_path) == (mended, [])


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nraise ValueError('a reason')\n```\n", "a reason"),
        ("```python\nimport warnings; warnings.warn('old')\n```\n", "old"),
        ("```python\nimport os; os._exit(3)\n```\n", "died"),
        ("```sh\nls\n```\n", "kind 'sh'"),
        ("```python\nx = 1\n", "other half"),
        ("  ```python\n  x = 1\n  ```\n```text\n", "other half"),
        ("```console\nls\n```\n", "no command"),
    ],
)
def test_a_page_that_cannot_run_is_refused(page: str, message: str, warm: Warm, tmp_path: Path) -> None:
    """Test a block that fails, and a block that would silently not be run."""
    with pytest.raises(PageError, match=message):
        run_page(page, warm, tmp_path)


def test_only_varying_text_is_excluded_from_the_comparison() -> None:
    """Test ids, times, sizes and measured numbers, which may differ, and counts, names, steps and words."""
    assert normal("id 3ae48366  2026-11-21 13:54:49  11.7 KiB  0.3125") == normal(
        "id 0123abcd 2027-01-01 00:00:00 1 KiB  0.5"
    )
    for line, other in (
        ("step 44", "step 45"),
        ("2 packs", "3 packs"),
        ("3 B", "3 packs"),
        ("model.w", "model.v"),
        ("damaged", "intact"),
    ):
        assert normal(line) != normal(other)


@pytest.mark.slow
def test_a_killed_script_ends_with_its_signal(warm: Warm, tmp_path: Path) -> None:
    """Test that a fork of the prepared process ends like a separate interpreter."""
    (tmp_path / "kill.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (tmp_path / "fail.py").write_text("raise SystemExit(7)\n")
    assert warm.run("python kill.py", tmp_path) == "[status 137]"
    assert warm.run("python fail.py", tmp_path) == "[status 7]"
    assert warm.run("python -c 'print(5)'", tmp_path) == "5"
