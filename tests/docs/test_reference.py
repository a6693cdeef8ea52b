"""Test that the reference names every public object, and the glossary. ``make docs`` checks methods and results."""

from __future__ import annotations

import re

import asymcheck
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_every_public_name_is_in_the_reference() -> None:
    """Test the entries of names of the package and integrations, and the overview of names of the package."""
    pages = {page.name: page.read_text() for page in REFERENCE.glob("*.md")}
    entries = set(re.findall(r"^::: (\S+)$", "".join(pages.values()), re.MULTILINE))
    names = [name for name in asymcheck.__all__ if name != "__version__"]
    modules = {path.stem for path in (ROOT / "asymcheck" / "integrations").glob("*.py")}
    internal = {"__init__", "trainer_callback", "dcp_listing", "dcp_uri"}
    integrations = {f"asymcheck.integrations.{name}" for name in modules - internal}
    assert integrations
    assert {f"asymcheck.{name}" for name in names} | integrations <= entries
    assert [name for name in names if f"`{name}`" not in pages["README.md"]] == []


def test_the_glossary_is_in_alphabetical_order() -> None:
    """Test that the glossary is sorted, repeats no definition of the tables above it, and links to these tables."""
    tables, _, glossary = (ROOT / "docs" / "concepts.md").read_text().partition("\n## Glossary\n")
    row = re.compile(r"^\| ([^|]+?)(?: \(\w+\))? \| [^|]+ \|$", re.MULTILINE)
    terms = row.findall(glossary)[1:]
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)
    defined = set(row.findall(tables)) - {"word"}
    assert defined.isdisjoint(terms)
    linked = re.findall(r"^- \[[\w ]+\]\(#[\w-]+\): (.+)$", glossary, re.MULTILINE)
    assert sorted(defined) == sorted(", ".join(linked).split(", "))
