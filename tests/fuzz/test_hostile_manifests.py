"""Test that hostile manifests with valid digests are refused by name, within bounded time and memory."""

import pytest

from asymcheck.errors import FormatError
from tests.fuzz.hostile_manifests import FAMILIES, PERHAPS
from tests.zygote import Zygote

KINDS = {kind.kind for kind in (FormatError, *FormatError.__subclasses__())} | {"unsupported-version"}


@pytest.mark.slow(quick=["rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hostile_manifest_is_refused(zygote: Zygote, family: str) -> None:
    """Test columns, batches, expanding bodies, headers, trees and rows: each raises an error of the format."""
    outcome = zygote.call("tests.fuzz.worker:run_cases", 280, family=family)
    assert outcome.returned, str(outcome)
    assert len(outcome.value) > 4
    wrong = {name: kind for name, kind in outcome.value.items() if kind not in KINDS}
    assert not wrong, "\n".join(f"{name}: {kind}" for name, kind in wrong.items())


@pytest.mark.parametrize("family", PERHAPS)
def test_numbers_that_lead_out_of_the_file_are_not_followed(zygote: Zygote, family: str) -> None:
    """Test each offset and length in body and messages, made negative or huge: refused, or without effect."""
    outcome = zygote.call("tests.fuzz.worker:run_cases", 280, family=family)
    assert outcome.returned, str(outcome)
    wrong = {name: kind for name, kind in outcome.value.items() if kind not in {*KINDS, "accepted"}}
    assert not wrong, "\n".join(f"{name}: {kind}" for name, kind in wrong.items())
    assert sum(kind in KINDS for kind in outcome.value.values()) > 20
