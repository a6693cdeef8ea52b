"""Test that loading runs no pickle: with all unpicklers disabled, every supported value is restored."""

import pickle
import random
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from asymcheck import RngState
from asymcheck.checkpointer import Checkpointer
from asymcheck.store import Store
from tests.damage.small_store import CONFIG, same
from tests.zygote import Zygote


class PoisonedError(BaseException):
    """An attempt to unpickle. No handler for ordinary errors may hide it."""


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1))


def _model_state() -> object:
    torch.manual_seed(2)
    return _model().state_dict()


def _everything() -> dict[str, object]:
    """Return a value of every kind that can be stored."""
    numbers = torch.Generator().manual_seed(3)
    tied = torch.randn(40, 30, generator=numbers)
    return {
        "tensors": [torch.randn(700, generator=numbers).to(kind) for kind in (torch.bfloat16, torch.float16)],
        "tied": (tied, tied),
        "array": np.arange(400.0),
        "scalar": np.float32(1.5),
        "module": _model_state(),
        "ordered": OrderedDict(b=1, a=2),
        "plain": [None, True, 1 << 90, -2.5, 3j, "é", b"\0", torch.Size([2, 3]), torch.int8, torch.device("cpu")],
        7: {"nested": {"deeper": (1, [2, {"x": torch.empty(0)}])}},
    }


def _poison() -> None:
    def poisoned(*_: object, **__: object) -> None:
        raise PoisonedError("something was unpickled")

    def hook(event: str, _: tuple[object, ...]) -> None:
        if event.startswith("pickle"):
            raise PoisonedError(event)

    # The hook detects the unpickler written in C, under any imported name.
    sys.addaudithook(hook)
    for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads"):
        setattr(pickle, name, poisoned)
    torch.load = poisoned  # type: ignore[assignment]  # JSON or a stand-in, untyped on purpose


def load_with_poison(path: str) -> list[str]:
    """Load with every method; return their names. Runs in a child, because an audit hook cannot be removed."""
    dangerous = pickle.dumps(random.Random)
    plain_loads = pickle.loads
    _poison()
    caught = []
    for loads in (pickle.loads, plain_loads):
        try:
            loads(dangerous)
        except PoisonedError:
            caught.append("poison works")
    model = _model()
    state = {"model": model, "rng": RngState()}
    with Store.open(path, config=CONFIG, create=True) as store:
        assert same(store.load(1), _everything())
        assert set(store.load(1, tensors="module.*")) == {"module"}  # type: ignore[call-overload]  # JSON or a stand-in, untyped on purpose
        into = _everything()
        into["tied"][0].zero_()  # type: ignore[index]  # JSON or a stand-in, untyped on purpose
        assert same(store.load(1, into={"tied": into["tied"]})["tied"], _everything()["tied"])  # type: ignore[index]  # JSON or a stand-in, untyped on purpose
        assert len(store.checkpoints()) == 2
        assert store.verify() == []
        Checkpointer(store, state, run="training", every=1, keep=None).restore()
        store.gc()
    return [*caught, "loaded"]


def test_nothing_is_unpickled(zygote: Zygote, tmp_path: Path) -> None:
    """Test loads, partial loads, fills, modules, generators, verify and gc, also with a rebuilt catalog."""
    path = tmp_path / "store"
    with Store.open(path, config=CONFIG, create=True) as store:
        store.save(_everything(), step=1)
        Checkpointer(store, {"model": _model(), "rng": RngState()}, run="training", every=1, keep=None).save(1)
    (path / "catalog" / "data.mdb").unlink()
    outcome = zygote.call("tests.damage.test_no_pickle:load_with_poison", path=str(path))
    assert outcome.value == ["poison works", "poison works", "loaded"], str(outcome)


def test_no_file_of_a_store_holds_a_pickle(tmp_path: Path) -> None:
    """Test that files have no pickle opcodes, except for bytes of the user."""
    with Store.open(tmp_path / "store", config=CONFIG, create=True) as store:
        store.save(_everything(), step=1)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"\x80\x04\x95" not in data
            assert b"\x80\x02" + b"ctorch" not in data
            assert not data.startswith(b"PK\x03\x04")
