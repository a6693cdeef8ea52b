"""Test the checker of English: problems that it finds, and text that it accepts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import prose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What a save did.", "opens with 'What'"),
        ("A save ends. So nothing is lost.", "opens with 'So'"),
        ("Return what is there.", "'what is there'"),
        (" ".join(["word"] * 41) + ".", "a sentence of 41 words"),
    ],
)
def test_a_stumbling_block_is_found(text: str, expected: str) -> None:
    """Test each rule with a violation."""
    (problem,) = prose.check_text("a.md", 3, text)
    assert (problem.where, problem.line) == ("a.md", 3)
    assert problem.text.startswith(expected)


@pytest.mark.parametrize(
    "text",
    [
        "Return the newest consistent checkpoint of a run.",
        "What does a save cost?",
        "Call `What is there` first.",
        " ".join(["word"] * 40) + ". " + " ".join(["word"] * 40) + ".",
    ],
)
def test_plain_english_is_left_alone(text: str) -> None:
    """Test questions, code, and sentences of the maximum length."""
    assert not list(prose.check_text("a.md", 1, text))


def test_code_blocks_of_documents_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test that paragraphs, items and cells are checked, with the line where each begins."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nFine\ntext.\n\n```\nWhat a block.\n```\n\n- So it is.\n| Of this | fine |\n")
    assert [(problem.line, problem.text.split(":")[0]) for problem in prose.check_document(page)] == [
        (10, "opens with 'So'"),
        (11, "opens with 'Of'"),
    ]


def test_docstrings_of_code_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test docstrings of modules, classes, functions and attributes."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text('"""Fine."""\n\nclass A:\n    """What it is."""\n\n    x = 1\n    """Who knows it."""\n')
    assert [problem.line for problem in prose.check_docstrings(module)] == [4, 7]


def test_comments_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test that consecutive lines are one paragraph, and that directives for tools are skipped."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text("# Fine.\n# Of this: bad.\nx = 1  # noqa: ERA001 - What for\n\ny = 2  # So what\n")
    assert [problem.line for problem in prose.check_comments(module)] == [1, 5]


def test_messages_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test errors and warnings, and that other strings are skipped."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text('x = "made anew"\nraise ValueError(f"{x} lies in a pack")\nwarn_user("it was made anew", None)\n')
    assert [problem.line for problem in prose.check_messages(module)] == [2, 3]


def test_names_and_docstrings_of_tests_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test that a name begins with a noun or a verb, and a docstring with "Test"."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    module = tmp_path / "test_module.py"
    tests = 'def test_{}() -> None:\n    """{}"""\n'
    names = {"what_is_lost": "Test it.", "lost_data": "Test it.", "a": "It is lost.", "b": ""}
    module.write_text("".join(tests.format(*item) for item in names.items()))
    assert [problem.line for problem in prose.check_tests(module)] == [1, 5]


def test_subjects_of_commits_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test the area prefix and the 72 characters, and that commits before the base are skipped."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for subject in ("Whatever came before", "docs: say it plainly", "Say it", f"docs: {'say it ' * 12}"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", subject], check=True)
    first = subprocess.run([*git, "rev-list", "--max-parents=0", "HEAD"], capture_output=True, text=True, check=True)
    texts = [problem.text.split(":")[0] for problem in prose.check_subjects(first.stdout.strip())]
    assert texts == ["its subject has 89 characters", "its subject has no area prefix"]
