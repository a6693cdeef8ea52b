"""Test that every malformed vector is refused with its named error, in bounded time and memory."""

import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from asymcheck.errors import AsymcheckError, FormatError
from asymcheck.format import registry
from tests.spec.corpus import READERS, Vector, vectors

SECONDS = 2.0
"""Time limit in seconds. The slowest valid vector takes a hundredth, and a trap would take minutes."""

BYTES = 24 << 20
"""Memory limit. The largest vector has one million bytes, and false lengths claim 256 MiB and more."""

KNOWN_NUMBERS = {
    "frame_kinds": registry.SUPPORTED_KINDS,
    "codecs": registry.SUPPORTED_CODECS,
    "digests": registry.SUPPORTED_DIGESTS,
}


@pytest.mark.parametrize("vector", vectors("invalid"), ids=str)
def test_malformed_vector_raises_the_named_error(vector: Vector, tmp_path: Path) -> None:
    """Test the exact kind, and that no error of another package is raised."""
    facts = vector.facts
    number = facts.get("number")
    if number and number["is"] in KNOWN_NUMBERS[number["of"]]:
        pytest.fail(
            f"{number['of']} {number['is']} is supported by now: make this vector anew with a number that is not"
        )
    with pytest.raises(AsymcheckError) as caught:
        READERS[facts["structure"]](vector.data, facts, tmp_path)
    assert caught.value.kind == facts["error_kind"], str(caught.value)
    assert isinstance(caught.value, FormatError)


@pytest.mark.parametrize("vector", vectors("invalid"), ids=str)
def test_refusal_is_cheap(vector: Vector, tmp_path: Path) -> None:
    """Test that no unchecked length of a malformed file determines time or memory."""
    facts, data = vector.facts, vector.data
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    # Measure the processor time of this process, because other tests may use the processor meanwhile.
    began = time.process_time()
    try:
        with pytest.raises(FormatError):
            READERS[facts["structure"]](data, facts, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < SECONDS
    assert peak < BYTES
    assert pa.total_allocated_bytes() - arrow_before < BYTES


def test_all_say_why() -> None:
    """Test that each vector has a reason, which other implementers need."""
    assert [str(vector) for vector in vectors("invalid") if len(vector.facts["why"].split()) < 2] == []
