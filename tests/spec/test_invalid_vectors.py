"""Every malformed vector is refused with its named error, in bounded time and memory."""

import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from asymcheck.errors import AsymcheckError, FormatError
from asymcheck.format import registry
from tests.spec.corpus import READERS, Vector, vectors

SECONDS = 2.0
"""What no vector may take. The slowest sound one takes a hundredth of it; a trap takes minutes."""

BYTES = 24 << 20
"""What reading a vector may allocate: the largest has one million bytes; those that lie claim 256 MiB and more."""

KNOWN_NUMBERS = {
    "frame_kinds": registry.SUPPORTED_KINDS,
    "codecs": registry.SUPPORTED_CODECS,
    "digests": registry.SUPPORTED_DIGESTS,
}


@pytest.mark.parametrize("vector", vectors("invalid"), ids=str)
def test_malformed_vector_raises_the_named_error(vector: Vector, tmp_path: Path) -> None:
    """Exactly the named kind, and never an error of another package."""
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
    """No unchecked length of a malformed file determines time or memory."""
    facts, data = vector.facts, vector.data
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    # Of this process, because other tests may have the processor meanwhile.
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
    """A vector without a reason cannot be judged by the next implementer."""
    assert [str(vector) for vector in vectors("invalid") if len(vector.facts["why"].split()) < 2] == []
