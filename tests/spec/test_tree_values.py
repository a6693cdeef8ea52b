"""Test that values of the format that torch cannot represent are refused by name."""

from pathlib import Path

import pytest
import torch

import asymcheck
from asymcheck.errors import StateMismatchError
from asymcheck.format import layout
from asymcheck.restore import state_template
from asymcheck.state.dtypes import TORCH_DTYPES
from asymcheck.state.numpy_dtypes import NUMPY_DTYPES
from tests.spec.corpus import read_tree
from tools.manifest_files import encode_manifest
from tools.vectors_manifest import HEADER, REF, header_for, inline_row, manifest_path


@pytest.mark.parametrize(
    ("node", "named"),
    [
        (b'["n","bfloat16","803f"]', "bfloat16"),
        (b'["n","float8_e4m3fn","80"]', "float8_e4m3fn"),
        (b'["v","warp:9"]', "warp:9"),
        (b'["v",""]', "''"),
        (b'["v","cpu; import os"]', "cpu; import os"),
    ],
)
def test_a_value_that_torch_or_numpy_lacks_is_named(node: bytes, named: str, tmp_path: Path) -> None:
    """Test a well-formed node of an unknown value: the StateMismatchError names it."""
    with pytest.raises(StateMismatchError, match=named):
        read_tree(node, {"rows": 0}, tmp_path)


def test_a_dtype_of_a_newer_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test a dtype as a value that this torch lacks."""
    known = {name: dtype for name, dtype in TORCH_DTYPES.items() if name != "float8_e8m0fnu"}
    monkeypatch.setattr(state_template, "TORCH_DTYPES", known)
    with pytest.raises(StateMismatchError, match="float8_e8m0fnu"):
        read_tree(b'["y","float8_e8m0fnu"]', {"rows": 0}, tmp_path)


@pytest.mark.parametrize("dtype", sorted(set(TORCH_DTYPES) - set(NUMPY_DTYPES)))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_an_array_of_a_dtype_that_numpy_lacks_is_refused(dtype: str, store_path: Path) -> None:
    """Test a row of a numpy array with a dtype that numpy lacks."""
    with asymcheck.Store.open(store_path, create=True):
        pass
    data = encode_manifest(header_for(["N", 0]), [inline_row("array", dtype, (1,))])
    path = store_path / manifest_path(data)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert layout.parse_checkpoint_name(path.parent.name) == REF
    with asymcheck.Store.open(store_path, read_only=True) as store, pytest.raises(StateMismatchError, match=dtype):
        store.load(HEADER.ref.step, run=HEADER.run)


def test_unusual_sizes_come_back(store_path: Path) -> None:
    """Test integers that no shape can have: -1, 2^53 and beyond."""
    sizes = [torch.Size([]), torch.Size([-1, 2]), torch.Size([1 << 53, -(1 << 53)]), torch.Size([(1 << 63) - 1])]
    with asymcheck.Store.open(store_path, create=True) as store:
        store.save({"sizes": sizes}, step=0)
        assert store.load() == {"sizes": sizes}
