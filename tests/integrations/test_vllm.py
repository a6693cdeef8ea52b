"""Test vLLM's weight transfer: with vLLM itself where it is installed, and with a stub of its interface everywhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from asymcheck import Publish
from asymcheck.errors import InconsistentCheckpointError, InvalidInputError, NotFoundError
from asymcheck.publish.release import Publisher

FOLLOW = Path(__file__).with_name("vllm_follow.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has other requirements than the tests")
@pytest.mark.parametrize(("ties", "workers"), [("tied", 1), ("untied", 1), ("untied", 2)])
def test_vllm_generates_with_each_release(tmp_path: Path, ties: str, workers: int) -> None:
    """Test the tokens after each release, in one process and in several, and after releases that cannot be read."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"[: 2 * workers - 1]}
    if ties == "tied":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, str(FOLLOW), str(tmp_path), ties, str(workers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert "followed" in done.stdout, done.stdout[-3000:] + done.stderr[-5000:]


class _Model(torch.nn.Module):
    """Stub of a model in vLLM: it takes weights by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights."""
        for name, tensor in weights:
            self.weights[name] = tensor.clone()
            if self.fails:
                raise RuntimeError("another architecture")


class _Engine:
    """Stub of vLLM's base class."""

    init_info_cls: type
    update_info_cls: type

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.model_config = model, None

    def parse_update_info(self, values: dict[str, Any]) -> object:
        """Make the dataclass."""
        return self.update_info_cls(**values)


class Worker(Protocol):
    """The engine, as vLLM calls it."""

    model: _Model
    init_info_cls: Callable[[str], object]

    def init_transfer_engine(self, init_info: object) -> None:
        """Follow a location."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Update to a release."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Return the engine on stubs of the modules of vLLM that it imports, for a model that does nothing."""
    stubs: dict[str, dict[str, object]] = {
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": _Engine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": object},
        "vllm.model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": torch.no_grad},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: model.names.append("begin"),
            "finalize_layerwise_reload": lambda model, _config: model.names.append("end"),
        },
    }
    for name, values in stubs.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "asymcheck.integrations.vllm", raising=False)
    built = importlib.import_module("asymcheck.integrations.vllm").ReleaseEngine(_Model())
    yield built
    built.shutdown()
    monkeypatch.delitem(sys.modules, "asymcheck.integrations.vllm")


def publish(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Publish a release, and return its weights by the names of the model."""
    state = {"layers.0.weight": torch.full((100_000,), float(step)), "head": torch.full((8,), float(-step))}
    with Publisher(Publish(str(folder / "releases"))) as publisher:
        publisher.publish({"model": state}, step)
    return state


def has(model: _Model, state: dict[str, torch.Tensor]) -> bool:
    """Compare all weights."""
    return model.weights.keys() == state.keys() and all(torch.equal(model.weights[name], state[name]) for name in state)


def test_the_engine_takes_verified_releases(engine: Worker, tmp_path: Path) -> None:
    """Test the newest release, one that was asked for, the same again, and releases that cannot be read."""
    with pytest.raises(InvalidInputError, match="no location"):
        engine.update_weights({})
    engine.init_transfer_engine(engine.init_info_cls(str(tmp_path / "releases")))
    with pytest.raises(NotFoundError, match="has no release yet"):
        engine.update_weights({"number": 1})
    engine.update_weights({})
    assert not engine.model.names

    states = [publish(tmp_path, step) for step in (1, 2, 3)]
    engine.update_weights({"number": 2})
    assert has(engine.model, states[1])
    engine.update_weights({"number": 2})
    assert engine.model.names == ["begin", "end"]
    with pytest.raises(InvalidInputError, match="release 1: the weights are of release 2"):
        engine.update_weights({"number": 1})
    engine.update_weights({})
    assert has(engine.model, states[2])

    publish(tmp_path, 4)
    for pack in (tmp_path / "releases" / "packs").iterdir():
        pack.write_bytes(bytes(pack.stat().st_size))
    with pytest.raises(InconsistentCheckpointError):
        engine.update_weights({"number": 4})
    assert has(engine.model, states[2])
    assert engine.model.names == ["begin", "end"] * 2


def test_weights_that_do_not_fit_are_loaded_again(engine: Worker, tmp_path: Path) -> None:
    """Test that the next update repairs a mixture, even if there is no newer release."""
    state = publish(tmp_path, 1)
    engine.init_transfer_engine(engine.init_info_cls(str(tmp_path / "releases")))
    engine.model.fails = True
    with pytest.raises(RuntimeError, match="another architecture"):
        engine.update_weights({})
    assert not has(engine.model, state)
    engine.model.fails = False
    engine.update_weights({})
    assert has(engine.model, state)
    assert engine.model.names == ["begin", "end"] * 2


def test_names_without_a_common_prefix_stay(engine: Worker, tmp_path: Path) -> None:
    """Test a state whose tensors have no common part of the name, and words that begin alike."""
    state = {"model": {"a": torch.ones(3)}, "models": {"b": torch.zeros(3)}}
    with Publisher(Publish(str(tmp_path / "releases"), tensors="*")) as publisher:
        publisher.publish(state, 1)
    engine.init_transfer_engine(engine.init_info_cls(str(tmp_path / "releases")))
    engine.update_weights({})
    assert sorted(engine.model.weights) == ["model.a", "models.b"]


def test_prefix_that_belongs_to_the_model_stays(engine: Worker, tmp_path: Path) -> None:
    """Test weights of a model with tied embeddings, all of which are below its part ``model``."""
    for name in ("model", "lm_head"):
        engine.model.add_module(name, torch.nn.Identity())
    state = {"model.embed.weight": torch.ones(3), "model.layers.weight": torch.zeros(3)}
    with Publisher(Publish(str(tmp_path / "releases"))) as publisher:
        for number, published in enumerate((state, {"model": state}), 1):
            publisher.publish(published, number)
            engine.model.weights.clear()
            engine.init_transfer_engine(engine.init_info_cls(str(tmp_path / "releases")))
            engine.update_weights({})
            assert has(engine.model, state)
