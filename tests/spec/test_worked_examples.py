"""Test that the worked examples of SPEC.md are bytes of the vectors."""

import pytest

from tests.spec import spec_text
from tests.spec.corpus import FORMAT_SPEC, VECTORS
from tests.spec.spec_text import HexExample, hex_text


@pytest.mark.parametrize("example", spec_text.hex_examples(), ids=str)
def test_worked_examples_are_slices_of_vectors(example: HexExample) -> None:
    """Test the bytes of each example."""
    data = (FORMAT_SPEC / example.vector).read_bytes()
    assert example.text == hex_text(data, example.start, example.end)


def test_worked_examples_exist() -> None:
    """Test a record, a frame header, a pack header, an index entry and a capture entry."""
    found = [(example.vector.split("/")[2], example.start) for example in spec_text.hex_examples()]
    assert found == [("record", 0), ("frame", 0), ("pack", 0), ("pack", 8192), ("ring", 8192)]
    assert spec_text.text().count("<!-- hex:") == len(found)
    assert all((VECTORS.parents[1] / example.vector).exists() for example in spec_text.hex_examples())
