"""Check the English of documents, docstrings and commit subjects: ``python -m tools.prose [--commits BASE]``.

A checker for writers, not a judge: a rule that misfires is changed here, not worked around in the text.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "SPEC.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md")
PACKAGES = ("asymcheck", "benchmarks", "format_spec", "tools")
RESULTS = ROOT / "docs" / "results"
WORDS_MAX = 40
"""Words of a sentence. The aim is 25; lists in a sentence may need more."""
SUBJECT_MAX = 72

_OPENINGS = re.compile(r"(What|Who|Whose|Whoever|Of|So(?! do| does| is)|Else|There)\b")
_BANNED = re.compile(
    r"\b(made anew|in all(?= *(?:[.,;:)]|$))|of one's own|of their own|what is there|takes? the room|is told|are told"
    r"|lies? (?:in|on|at)|as ever|all the same|no odds|whoever|somebody else's)\b",
    re.IGNORECASE,
)
_SUBJECT = re.compile(r"[a-z_./, -]+: [a-z]")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])(?<!e\.g\.)(?<!i\.e\.)[*_)\"]*\s+")
_CODE = re.compile(r"``?[^`]*``?|:[a-z]+:`[^`]*`")
_LITERAL = re.compile(r"::\n\n(?: +[^\n]*\n+)+")
_FENCE = re.compile(r"^(```|~~~)")


class Problem(NamedTuple):
    """A place whose English a reader may stumble over."""

    where: str
    line: int
    what: str


def check_text(where: str, line: int, text: str) -> Iterator[Problem]:
    """Check a paragraph: openings, banned words, and the length of its sentences."""
    for sentence in _SENTENCE_END.split(" ".join(_CODE.sub("x", text).split())):
        start = " ".join(sentence.split()[:6])
        if _OPENINGS.match(sentence) and not sentence.endswith("?"):
            yield Problem(where, line, f"opens with {sentence.split()[0]!r}: {start} …")
        if len(sentence.split()) > WORDS_MAX:
            yield Problem(where, line, f"a sentence of {len(sentence.split())} words: {start} …")
        for found in _BANNED.finditer(sentence):
            yield Problem(where, line, f"{found[0]!r}: {start} …")


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
            # List items, and the entries of Args and Raises, are paragraphs of their own.
            text = _LITERAL.sub("", node.value.value.partition("\b")[0])
            for paragraph in re.split(r"\n\s*\n|\n\s*(?=- |[\w*, ]+: )", text):
                yield from check_text(where, node.lineno, re.sub(r"^\s*(- |[\w*, ]+:\s)", "", paragraph))


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
    """Check everything in the checkout that a person reads, but for comments and messages."""
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            # Reports are generated: their words are in the benchmarks.
            if RESULTS not in path.parents:
                yield from check_document(path)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from check_docstrings(path)


def main() -> None:
    """Print the problems, one a line; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", metavar="BASE", help="also check the subjects of the commits since BASE")
    arguments = parser.parse_args()
    found = [*problems(), *(check_subjects(arguments.commits) if arguments.commits else ())]
    for one in found:
        print(f"{one.where}:{one.line}: {one.what}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
