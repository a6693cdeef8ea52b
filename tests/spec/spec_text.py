"""SPEC.md as data: tagged tables, worked examples in hexadecimal, and sections."""

import dataclasses
import re
from functools import cache
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "SPEC.md"

_TABLE = re.compile(r"<!-- table: (\w+) -->\n((?:\|.*\n)+)")
_HEX = re.compile(r"<!-- hex: (\S+) (\d+):(\d+) -->\n```\n(.*?)```\n", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class HexExample:
    """A worked example: the slice of a vector that it claims to be, and its text."""

    vector: str
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.vector}[{self.start}:{self.end}]"


@cache
def text() -> str:
    """The whole specification."""
    return SPEC.read_text("utf-8")


@cache
def tables() -> dict[str, list[dict[str, str]]]:
    """Every tagged table: rows by heading of the column, markup as it is written."""
    found = {}
    for match in _TABLE.finditer(text()):
        head, rule, *rows = (_cells(line) for line in match[2].splitlines())
        assert all(set(cell) <= set("-: ") for cell in rule), match[1]
        assert all(len(row) == len(head) for row in rows), f"{match[1]} has rows of different lengths"
        found[match[1]] = [dict(zip(head, row, strict=True)) for row in rows]
    return found


def table(name: str) -> list[dict[str, str]]:
    """The rows of one table."""
    return tables()[name]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def code(cell: str) -> str:
    """The content of a cell that is one piece of code."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, f"{cell!r} is not one piece of code"
    return match[1]


def hex_examples() -> list[HexExample]:
    """Every worked example."""
    return [HexExample(match[1], int(match[2]), int(match[3]), match[4]) for match in _HEX.finditer(text())]


def hex_text(data: bytes, start: int, end: int) -> str:
    """A slice of a vector as an example shows it: offset, bytes, and what is printable of them."""
    lines = []
    for offset in range(start, end, 16):
        part = data[offset : min(offset + 16, end)]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{offset:05x}  {part.hex(' '):<47}  {shown}".rstrip() + "\n")
    return "".join(lines)


def sections() -> set[str]:
    """The numbers of all sections: `A5`, `A5.1`, ..."""
    return set(re.findall(r"^#{3,4} ([A-C]\d+(?:\.\d+)?)\.? ", text(), re.MULTILINE))


def reading_words() -> int:
    """The number of words of Part A, without the dumps in hexadecimal."""
    part = text().partition("## Part A.")[2].partition("## Part B.")[0]
    return len(re.findall(r"\S*\w\S*", _HEX.sub("", part)))
