"""Test module hooks: marks where forward and backward reach a block, without side effects."""

import copy
import gc
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asymcheck.capture.schedule import ModuleHooks, blocks_of
from asymcheck.state.partition_plan import Phase

WIDTH = 16
F: Phase = "forward"
B: Phase = "backward"


class Block(nn.Module):
    """A transformer block with manual attention and an MLP with an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the shape (batch, time, width) to the same shape."""
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


class Gpt(nn.Module):
    """A model of an embedding, blocks in a ModuleList and a head, optionally with activation checkpointing."""

    def __init__(self, layers: int = 3, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 32)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map the shape (batch, time) to (batch, time, vocabulary)."""
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Pair(nn.Module):
    """A block that returns a tuple whose first entry the next block does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Map two tensors to two."""
        y = self.linear(x[1])
        return y * 2, y + 1


class Named(nn.Module):
    """Returns the tensor of a tuple in a mapping, at the end of the model."""

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> dict[str, object]:
        """Map a tuple to a mapping."""
        return {"cache": None, "y": x[1] * 3}


TOKENS = torch.arange(24).reshape(2, 12)
ROWS = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def _inplace() -> nn.Module:
    # Each activation overwrites the output of the previous block.
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def _frozen() -> nn.Module:
    model = Gpt(4)
    for part in (model.embedding, *model.blocks[:2]):
        part.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, list[Phase]]] = {
    "gpt": (Gpt, TOKENS, [F] * 3 + [B] * 3),
    "dropout": (lambda: Gpt(dropout=0.5), TOKENS, [F] * 3 + [B] * 3),
    "sequential in place": (_inplace, ROWS, [F] * 4 + [B] * 4),
    "checkpointed": (lambda: Gpt(reentrant=False), TOKENS, [F] * 3 + [B] * 3),
    # The first forward pass of a checkpointed block has no gradients, so only backward marks appear.
    "checkpointed reentrant": (lambda: Gpt(reentrant=True), TOKENS, [B] * 3),
    "frozen first layers": (_frozen, TOKENS, [F] * 4 + [B] * 2),
    "one block used twice": (lambda: nn.Sequential(*[Block()] * 4), ROWS[None], [F] * 4 + [B] * 4),
}


@contextmanager
def _marks(*modules: nn.Module) -> Iterator[list[Phase]]:
    seen: list[Phase] = []
    boundaries = ModuleHooks(modules, seen.append)
    yield seen
    boundaries.remove()


def _train(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Train three steps; return losses, gradients and parameters."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters())
    results: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return results + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_marks_come_where_blocks_begin_and_results_stay_bit_for_bit(name: str) -> None:
    """Test one forward mark a block, one backward mark a block with gradients, and equal results."""
    build, inputs, expected = MODELS[name]
    torch.manual_seed(1)
    model = build()
    with _marks(twin := copy.deepcopy(model)) as seen:
        found = _train(twin, inputs)
    wanted = _train(model, inputs)
    assert seen == expected * 3
    assert len(found) == len(wanted) > 6
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_each_mark_comes_before_the_work_of_its_block() -> None:
    """Test with separate hooks at the beginning and the end of each block."""
    order: list[str] = []
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    boundaries = ModuleHooks([model], order.append)
    for number, block in enumerate(model):
        block.register_forward_hook(lambda _m, _i, _o, n=number: order.append(f"forward of {n}"))
        block.weight.register_hook(lambda _g, n=number: order.append(f"gradient of {n}"))
    model(ROWS).sum().backward()
    boundaries.remove()
    forward = [entry for n in range(3) for entry in ("forward", f"forward of {n}")]
    assert order == forward + [entry for n in (2, 1, 0) for entry in ("backward", f"gradient of {n}")]


def test_an_accumulated_step_has_the_marks_of_each_micro_batch() -> None:
    """Test that marks are in order of time."""
    model = Gpt(2)
    with _marks(model) as seen:
        for _ in range(2):
            model(TOKENS).sum().backward()
    assert seen == [F, F, B, B, F, F, B, B]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_gives_no_marks(mode: Callable[[], torch.no_grad]) -> None:
    """Test that an evaluation between two steps does not count as an iteration."""
    model = Gpt()
    with _marks(model) as seen:
        with mode():
            model(TOKENS)
        assert seen == []
        model(TOKENS)
    assert seen == [F] * 3


def test_outputs_in_tuples_and_mappings_are_followed() -> None:
    """Test that a block is marked at the first gradient of its outputs, even if another output is unused."""
    model = nn.Sequential(Pair(), Pair(), Named())
    with _marks(model) as seen:
        model((ROWS, ROWS))["y"].sum().backward()
        assert seen == [F] * 3 + [B] * 3
        seen.clear()
        first, second = model[0]((ROWS, ROWS))
        (first + second).sum().backward()
    assert seen == [F, B]


def test_nothing_is_marked_after_removal() -> None:
    """Test modules and graphs that were built before the removal, and that the modules are unchanged."""
    model = Gpt()
    before = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()]
    seen: list[Phase] = []
    boundaries = ModuleHooks([model, model.blocks[0]], seen.append)
    loss = model(TOKENS).sum()
    # The second module of the list has its own blocks, in its MLP.
    assert seen == [F] * 6
    seen.clear()
    boundaries.remove()
    boundaries.remove()
    loss.backward()
    model(TOKENS).sum().backward()
    assert seen == []
    assert [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()] == before


def test_no_tensor_is_kept_alive() -> None:
    """Test that outputs, graph and gradients are freed without the garbage collector."""
    model = Gpt()
    outputs: list[weakref.ref[torch.Tensor]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, output: outputs.append(weakref.ref(output)))
    gc.disable()
    try:
        with _marks(model):
            loss = model(TOKENS).sum()
            del loss
            assert [output() for output in outputs] == [None] * 3
            loss = model(TOKENS).sum()
            loss.backward()
            del loss
            assert [output() for output in outputs] == [None] * 6
    finally:
        gc.enable()


def test_a_copy_of_the_model_is_silent() -> None:
    """Test a deep copy, such as an average of weights, and a pickled model, which do not call the original's owner."""
    model = Gpt()
    seen: list[Phase] = []

    def mark(phase: Phase) -> None:
        """Mark; a local function, which cannot be pickled."""
        seen.append(phase)

    boundaries = ModuleHooks([model], mark)
    pickled = pickle.dumps(model)
    assert b"asymcheck" not in pickled  # A pickle needs a class of the module.
    for twin in (copy.deepcopy(model), pickle.loads(pickled), copy.deepcopy(pickle.loads(pickled))):
        twin(TOKENS).sum().backward()
        assert seen == []
        assert torch.equal(twin(TOKENS), model(TOKENS))
        seen.clear()
    boundaries.remove()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns that TorchScript is deprecated.
def test_a_layer_in_torchscript_gives_no_marks() -> None:
    """Test a layer that accepts no hooks between layers with hooks."""
    first, second, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = nn.Sequential(first, torch.jit.script(second), last)
    with _marks(model) as seen:
        model(ROWS).sum().backward()
    assert seen == [F, F, B, B]


class Unwilling(nn.Linear):
    """A layer that refuses hooks after its forward pass."""

    def register_forward_hook(self, *_arguments: object, **_options: object) -> NoReturn:
        """Refuse."""
        raise RuntimeError("not this one")


def test_a_module_that_refuses_its_hooks_leaves_none_on_others() -> None:
    """Test that no hook stays, because a second attempt would add it twice."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unwilling(WIDTH, WIDTH))
    seen: list[Phase] = []
    with pytest.raises(RuntimeError, match="not this one"):
        ModuleHooks([model], seen.append)
    assert [len(block._forward_pre_hooks) + len(block._forward_hooks) for block in model] == [0, 0]
    model(ROWS).sum().backward()
    assert seen == []


class Mixture(nn.Module):
    """Two layers, each with a list of experts that is longer than the list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(Block() for _ in range(5))}) for _ in "ab")


def test_blocks_are_the_longest_list_that_is_no_part_of_a_layer() -> None:
    """Test that the children are blocks without such a list, and the module itself without children."""
    gpt, mixture = Gpt(4), Mixture()
    assert blocks_of(gpt) == [*gpt.blocks]
    assert blocks_of(nn.Sequential(nn.Sequential(gpt))) == [*gpt.blocks]
    assert blocks_of(mixture) == [*mixture.layers]
    body = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    assert blocks_of(nn.Sequential(body, nn.Linear(2, 2))) == [*body]
    single = Gpt(1)
    assert blocks_of(single) == [*single.blocks[0].mlp]
    pair = Pair()
    assert blocks_of(pair) == [pair.linear]
    assert blocks_of(pair.linear) == [pair.linear]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses features that Python has deprecated.
def test_a_compiled_module_is_one_block_and_its_graph_stays_whole() -> None:
    """Test hooks set before and after compiling: no graph break, no inner marks, equal results."""
    torch.manual_seed(1)
    model = Gpt(2)
    plain = copy.deepcopy(model)
    inner: list[Phase] = []
    before = ModuleHooks([model], inner.append)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with _marks(compiled) as seen:
        compiled(TOKENS).sum().backward()
    before.remove()
    plain(TOKENS).sum().backward()
    assert inner == []
    assert seen == [F, B]
    assert blocks_of(compiled) == [compiled]
    gradients = [parameter.grad for parameter in model.parameters()]
    for one, parameter in zip(gradients, plain.parameters(), strict=True):
        assert one is not None
        assert parameter.grad is not None
        assert torch.allclose(one, parameter.grad)


def test_a_hook_costs_microseconds() -> None:
    """Test the best of several passes through 200 empty blocks, with a bound of twenty times the usual time."""
    blocks = [nn.Identity() for _ in range(200)]
    model = nn.Sequential(*blocks)
    leaf = torch.ones(1, requires_grad=True)

    def best() -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            model(leaf * 1).backward()
            times.append(time.perf_counter() - start)
        return min(times)

    without = best()
    with _marks(model) as seen:
        with_hooks = best()
    assert len(seen) == 20 * 400
    assert (with_hooks - without) / 200 < 100e-6
