"""Boundaries between modules: hooks that say when forward and backward reach the next block.

They only look: the outputs of a block are the very tensors they would be without. So the backward pass is seen through
hooks on nodes of the graph and not through ``register_full_backward_pre_hook``. That one passes inputs and outputs of
the module through a function of its own, after which an in-place operation on them, such as the next ReLU, raises.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from asymcheck.partition.profile import Phase

Mark = Callable[[Phase], None]


class Boundaries:
    """Calls ``mark`` at the start of each block's forward and when backward reaches each block, until removed.

    Blocks are the elements of the longest ``ModuleList`` or ``Sequential`` of at least two, else the direct children,
    else the module itself. A forward without gradients gives no marks, and neither does one that recomputes activations
    inside backward. A block whose output needs no gradient gives no backward mark, and one in TorchScript, which takes
    no hooks, gives none at all. Inside a region of ``torch.compile`` there are no boundaries: hook such a module as a
    whole.

    On CUDA, autograd calls ``mark`` from threads of its own. What ``mark`` raises breaks the training.
    """

    def __init__(self, modules: Sequence[nn.Module], mark: Mark) -> None:
        """Register the hooks: two for each block, a microsecond or two each."""
        self._hooks = _Hooks(mark)
        self._handles: list[RemovableHandle] = []
        blocks = {id(block): block for module in modules for block in blocks_of(module)}
        try:
            for block in blocks.values():
                if not isinstance(block, torch.jit.ScriptModule):
                    self._handles.append(block.register_forward_pre_hook(self._hooks.enter))
                    self._handles.append(block.register_forward_hook(self._hooks.leave))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the hooks; graphs that are still alive give no marks any more. May be called again."""
        self._hooks.mark = None
        while self._handles:
            self._handles.pop().remove()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose beginnings are boundaries; at least one."""
    if _is_compiled(module):
        return [module]
    longest = max(_lists(module), key=len, default=None)
    blocks = list(module.children() if longest is None else longest)
    return blocks or [module]


def _lists(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    """Yield the lists of at least two modules, outermost first."""
    if _is_compiled(module):
        return
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
        yield module
        if isinstance(module, nn.ModuleList):
            # Its elements are layers; lists inside a layer are parts of it, such as the experts of one mixture.
            return
    for child in module.children():
        yield from _lists(child)


def _is_compiled(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns; its class has no public name."""
    return hasattr(module, "_orig_mod")


class _Hooks:
    """The hooks of all blocks. They hold no tensor; copies, as in a deep copy of the model, are silent."""

    def __init__(self, mark: Mark | None) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[type[types.SimpleNamespace], tuple[()], dict[str, object]]:
        # Who loads a model that was pickled whole need not have this package: this one takes anything and does nothing.
        nothing = contextlib.nullcontext().__exit__
        return types.SimpleNamespace, (), {"mark": None, "enter": nothing, "leave": nothing}

    def enter(self, _block: nn.Module, _args: object) -> None:
        # The compiler takes the first for a constant and leaves the hook out; a call of mark would break its graph.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _in_backward():
            return
        if self.mark is not None:
            self.mark("forward")

    def leave(self, _block: nn.Module, _args: object, output: object) -> None:
        # Also in backward: reentrant checkpointing has no graph but that of the recomputed forward.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        reached = _Reached(self)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)


class _Reached:
    """Marks a block when the first of its outputs has its gradient."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks: _Hooks | None = hooks

    def __call__(self, _gradients: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None and hooks.mark is not None:
            hooks.mark("backward")


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a block's output; what is nested deeper, such as a cache, is not for the next block."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor):
            yield value


def _in_backward() -> bool:
    """Whether this thread runs a backward pass. Checkpointing in torch asks the same way; there is no public one."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - see above
