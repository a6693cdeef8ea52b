"""Check the English of documents, code, test names and commits: ``python -m tools.prose [--commits BASE]``.

The check is a tool for writers. Change a rule that misfires here, instead of working around it in the text.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "SPEC.md", "CHANGELOG.md", "CONTRIBUTING.md", "*/README.md", "docs/**/*.md")
PACKAGES = ("asymcheck", "benchmarks", "format_spec", "tools")
RESULTS = ROOT / "docs" / "results"
WORDS_MAX = 40
"""Maximum words of a sentence. The aim is 25; lists in a sentence may need more."""
SUBJECT_MAX = 72

_OPENINGS = re.compile(r"(What|Who|Whose|Whoever|Of|So(?! do| does| is)|Else|There)\b")
_BANNED = re.compile(
    r"\b(made anew|in all(?= *(?:[.,;:)]|$))|of one's own|of their own|what is there|takes? the room|is told|are told"
    r"|lies? (?:in|on|at)|as ever|all the same|no odds|whoever|somebody else's)\b",
    re.IGNORECASE,
)
_TEST_NAME = re.compile(r"test_(what|who|whose|whoever|of|so|else|there)_")
_REPORTING = ("warn_user", "Finding")
_SUBJECT = re.compile(r"[a-z_./, -]+: [a-z]")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])(?<!e\.g\.)(?<!i\.e\.)[*_)\"]*\s+")
_CODE = re.compile(r"``?[^`]*``?|:[a-z]+:`[^`]*`")
_LITERAL = re.compile(r"::\n\n(?: +[^\n]*\n+)+")
_FENCE = re.compile(r"^(```|~~~)")


class Problem(NamedTuple):
    """A line that breaks a rule."""

    where: str
    line: int
    text: str


def check_text(where: str, line: int, text: str) -> Iterator[Problem]:
    """Check a paragraph: openings, banned words, and the length of its sentences."""
    for sentence in _SENTENCE_END.split(" ".join(_CODE.sub("x", text).split())):
        start = " ".join(sentence.split()[:6])
        if _OPENINGS.match(sentence) and not sentence.endswith("?"):
            yield Problem(where, line, f"opens with {sentence.split()[0]!r}: {start} …")
        if len(sentence.split()) > WORDS_MAX:
            yield Problem(where, line, f"a sentence of {len(sentence.split())} words: {start} …")
        yield from check_words(where, line, sentence)


def check_words(where: str, line: int, text: str) -> Iterator[Problem]:
    """Check a text for banned words."""
    for match in _BANNED.finditer(text):
        yield Problem(where, line, f"{match[0]!r}: {text[max(match.start() - 20, 0) : match.end() + 20]}")


def check_document(path: Path) -> Iterator[Problem]:
    """Check the paragraphs, list items and table cells of a Markdown file, not its headings and code blocks."""
    where, in_code, first = str(path.relative_to(ROOT)), False, 1
    paragraph: list[str] = []
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        is_fence = _FENCE.match(line.strip()) is not None
        in_code ^= is_fence
        text = "" if is_fence or in_code or line.startswith(("    ", "<")) else line.strip()
        is_new = not text or text.startswith(("#", "|", "- ", "* ", ">")) or re.match(r"\d+\. ", text) is not None
        if is_new and paragraph:
            yield from check_text(where, first, " ".join(paragraph))
            paragraph = []
        if text.startswith("|"):
            for cell in text.strip("|").split("|"):
                yield from check_text(where, number, cell.strip())
        elif text and not text.startswith("#"):
            if not paragraph:
                first = number
            paragraph.append(re.sub(r"^(#+|[-*>]|\d+\.) +", "", text))


def check_docstrings(path: Path) -> Iterator[Problem]:
    """Check the docstrings of a module, its classes and functions, and those below attributes."""
    where = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            # List items, and entries of Args and Raises, are separate paragraphs.
            text = _LITERAL.sub("", node.value.value.partition("\b")[0])
            for paragraph in re.split(r"\n\s*\n|\n\s*(?=- |[\w*, ]+: )", text):
                yield from check_text(where, node.lineno, re.sub(r"^\s*(- |[\w*, ]+:\s)", "", paragraph))


def check_comments(path: Path) -> Iterator[Problem]:
    """Check comments. Consecutive lines are one paragraph, but not comments after code."""
    where, paragraph, first, last = str(path.relative_to(ROOT)), list[str](), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        text = token.string.lstrip("#: ")
        if token.type != tokenize.COMMENT or text.startswith(("noqa", "type:", "!", "pragma")):
            continue
        is_after_code = bool(token.line[: token.start[1]].strip())
        if paragraph and (is_after_code or token.start[0] != last + 1):
            yield from check_text(where, first, " ".join(paragraph))
            paragraph = []
        first, last = (first if paragraph else token.start[0]), token.start[0]
        paragraph.append(text)
    yield from check_text(where, first, " ".join(paragraph))


def check_messages(path: Path) -> Iterator[Problem]:
    """Check the words of errors, warnings and findings."""
    where = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        is_report = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REPORTING
        if isinstance(node, ast.Raise) or is_report:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from check_words(where, part.lineno, part.value)


def check_tests(path: Path) -> Iterator[Problem]:
    """Check that names of tests begin with a noun or a verb, and their docstrings with "Test"."""
    where = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            if _TEST_NAME.match(node.name):
                yield Problem(where, node.lineno, f"name begins with a relative clause: {node.name}")
            if not (ast.get_docstring(node) or "Test").startswith("Test"):
                yield Problem(where, node.lineno, f'docstring does not begin with "Test": {node.name}')


def check_subjects(base: str) -> Iterator[Problem]:
    """Check the subjects of the commits since ``base``."""
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT_MAX:
            yield Problem(f"commit {commit}", 1, f"its subject has {len(subject)} characters: {subject}")
        if not _SUBJECT.match(subject):
            yield Problem(f"commit {commit}", 1, f"its subject has no area prefix: {subject}")


def problems() -> Iterator[Problem]:
    """Check everything in the checkout that a person reads, except generated reports."""
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            # Skip generated reports; their text is in the benchmarks.
            if RESULTS not in path.parents:
                yield from check_document(path)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from check_docstrings(path)
            yield from check_comments(path)
            yield from check_messages(path)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        yield from check_tests(path)


def main() -> None:
    """Print one problem per line; exit with status 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", metavar="BASE", help="also check the subjects of the commits since BASE")
    arguments = parser.parse_args()
    found = [*problems(), *(check_subjects(arguments.commits) if arguments.commits else ())]
    for problem in found:
        print(f"{problem.where}:{problem.line}: {problem.text}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
