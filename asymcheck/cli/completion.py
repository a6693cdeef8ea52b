"""Shell completion of the steps, runs and parts in a store."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem

from asymcheck.cli import output
from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import AsymcheckError
from asymcheck.store import Store


def add_completion(parameter: click.Parameter) -> None:
    """Complete a parameter that names a step, a run or a part, if the command line has a store before it."""
    values = _VALUES.get(parameter.name or "")
    if values is not None:
        parameter.shell_complete = functools.partial(_complete, values)  # type: ignore[method-assign]  # for this parameter only


def _complete(
    values: Callable[[Store, str], Iterator[CompletionItem]], ctx: click.Context, incomplete: str
) -> list[CompletionItem]:
    if all(parameter.name != "store" for parameter in ctx.command.params):
        return []
    # click leaves the arguments unparsed if the command line ends with an option without its value.
    location = ctx.params.get("store") or next(iter(ctx.args), None)
    if location is None:
        return []
    # An error message would damage the command line that is being completed.
    with contextlib.suppress(AsymcheckError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Store.open(location, read_only=True) as store:
            items = values(store, ctx.params.get("run") or DEFAULT_RUN)
            return [item for item in items if str(item.value).startswith(incomplete)]
    return []


def _steps(store: Store, run: str) -> Iterator[CompletionItem]:
    for checkpoint in reversed(store.checkpoints(run)):
        yield CompletionItem(str(checkpoint.step), help=output.age(checkpoint.created_ns))


def _runs(store: Store, _run: str) -> Iterator[CompletionItem]:
    yield from map(CompletionItem, store.runs())


def _parts(store: Store, run: str) -> Iterator[CompletionItem]:
    _, tensors = store.tensors(run=run)
    yield from map(CompletionItem, dict.fromkeys(tensor.name.split(".")[0] for tensor in tensors))


_VALUES = {"step": _steps, "a": _steps, "b": _steps, "run": _runs, "part": _parts}
