"""Test hostile names: control characters are escaped for terminals, but not in JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asymcheck import Store
from asymcheck.cli import exit_status, output
from tests.cli.conftest import Outcome
from tests.convert.files import U8, raw

Call = Callable[..., Outcome]

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\nasymcheck: all is well\r\u202eb\x9bü×"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\nasymcheck: all is well\r\u202eb\x9bü×"


@pytest.fixture
def hostile(call: Call, tmp_path: Path) -> Path:
    """Return a store of an untrusted file, with a second step in which its tensor differs."""
    (tmp_path / "m.safetensors").write_bytes(raw({HOSTILE: U8}, b"x"))
    assert call("convert", tmp_path / "m.safetensors", tmp_path / "store").status == exit_status.OK
    with Store.open(tmp_path / "store", create=True) as store:
        names = {HOSTILE: torch.tensor([9], dtype=torch.float8_e4m3fn), "rest": 1}
        store.save({"model": names, "l": torch.ones(9), HOSTILE: 3}, step=1, metrics={HOSTILE: 1.0})
    return tmp_path / "store"


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "{}"),
        ("inspect", "{}", "--step", "0"),
        ("inspect", "{}", "--values"),
        ("inspect", "{}", "--step", "1", "--values", "--tensors", "nothing"),
        ("log", "{}"),
        ("diff", "{}", "0", "1"),
        ("restore", "{}", "--to", "{}/../o.safetensors"),
        ("restore", "{}", "--to", "{}/../o.pt", "--part", "nothing"),
    ],
    ids=" ".join,
)
def test_no_name_is_obeyed(call: Call, hostile: Path, words: tuple[str, ...]) -> None:
    """Test tables, lines and messages; each name stays in one line."""
    outcome = call(*(word.format(hostile) for word in words))
    text = outcome.out + outcome.err
    assert SHOWN in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\nasymcheck: all is well" not in text


def test_hostile_tensor_name_in_a_report(call: Call, hostile: Path) -> None:
    """Test reports of damage."""
    with Store.open(hostile, create=True) as store:
        store.save({HOSTILE: torch.ones(9000)}, step=2)
    max((hostile / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns).unlink()
    for words in (("verify", hostile), ("restore", hostile, "--to", hostile.parent / "o.pt", "--step", 2)):
        outcome = call(*words)
        assert "\x1b" not in outcome.out + outcome.err
        assert r"\x1b]0;owned\x07" in outcome.out + outcome.err


def test_json_keeps_names_unescaped(call: Call, hostile: Path) -> None:
    """Test that JSON, which no terminal interprets, has the original name."""
    tensors = call("inspect", hostile, "--step", 0, "--json").json["tensors"]
    assert [item["name"] for item in tensors] == [f"model.{HOSTILE}"]  # type: ignore[attr-defined]  # JSON


def test_printable_names_are_not_escaped() -> None:
    """Test that only control characters are escaped."""
    assert output.printable("ü × − 日本 'a\\b'") == "ü × − 日本 'a\\b'"
    assert output.printable("\ud800\U000e0001\u00a0") == r"\ud800\U000e0001\xa0"
