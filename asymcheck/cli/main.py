"""The group of commands, and how errors become messages and exit statuses."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class

from asymcheck.cli import output
from asymcheck.cli.doctor_command import doctor
from asymcheck.cli.exit_status import DEFECT, HELP, INTERRUPTED, STORAGE, status_of
from asymcheck.cli.inspect_command import inspect
from asymcheck.cli.maintenance import delete, gc, rebuild, verify
from asymcheck.cli.reports import diff, du, log
from asymcheck.cli.transfer import convert, pull, push, restore
from asymcheck.config import __version__
from asymcheck.errors import (
    AbandonedCheckpointsWarning,
    AsymcheckError,
    RemoteCopyWarning,
    SkippedCheckpointWarning,
    StepOrderWarning,
    UnreachableRemoteWarning,
)

_PROGRAM = "asymcheck"
_VARIABLE = "_ASYMCHECK_COMPLETE"


@click.command(epilog=HELP, short_help="Print the script that makes a shell complete asymcheck's commands.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete asymcheck's commands, options and paths.

    \b
    bash: eval "$(asymcheck completion bash)"                        in ~/.bashrc
    zsh:  eval "$(asymcheck completion zsh)"                         in ~/.zshrc
    fish: asymcheck completion fish > ~/.config/fish/completions/asymcheck.fish
    """
    root = ctx.find_root().command
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(kind(root, {}, _PROGRAM, _VARIABLE).source())


_WARNINGS = (
    AbandonedCheckpointsWarning,
    RemoteCopyWarning,
    SkippedCheckpointWarning,
    StepOrderWarning,
    UnreachableRemoteWarning,
)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> NoReturn:
        try:
            with _warnings_as_notes():
                status = super().invoke(ctx)
            ctx.exit(status or 0)
        except AsymcheckError as error:
            output.note(str(error))
            ctx.exit(status_of(error))
        except KeyboardInterrupt:
            # Click's own status would be 1, which says that a checkpoint is lost.
            output.note("interrupted")
            ctx.exit(INTERRUPTED)


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print the package's warnings as what they say; the line of click's that called is nobody's concern."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:  # noqa: ANN401 - passed on
            if issubclass(category, _WARNINGS):
                output.note(str(message))
            else:
                shown(message, category, *place, **more)

        warnings.showwarning = show
        for category in _WARNINGS:
            warnings.simplefilter("always", category)
        yield


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="asymcheck")
def commands() -> None:
    """Look at, check, mend and convert asymcheck checkpoint stores.

    A store is a directory that a training loop saves to with asymcheck.Store or asymcheck.Checkpointer. Where a command
    only reads, and for gc and delete, it may also be a remote location that checkpoints were pushed to, such as
    hdfs://namenode:8020/runs/gpt2.
    """


for _command in (
    *(completion, convert, delete, diff, doctor, du, gc, inspect, log),
    *(pull, push, rebuild, restore, verify),
):
    commands.add_command(_command)


def main() -> None:
    """Run the command line."""
    # As other programs: `asymcheck log STORE | head` ends quietly when head has seen enough.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # else it is ignored, as nohup has it
            signal.signal(number, _end)
    _prepare_streams()
    try:
        try:
            commands()
        finally:
            sys.stdout.flush()
    except OSError as error:
        click.echo(f"asymcheck: cannot write the output: {error}", err=True)
        _leave(STORAGE)
    except Exception:  # noqa: BLE001 - a status of its own: Python's own would say that a checkpoint is lost
        traceback.print_exc()
        _leave(DEFECT)


def _end(number: int, _frame: FrameType | None) -> None:
    # As after an interrupt, what is half written is removed on the way out.
    sys.exit(128 + number)


def _prepare_streams() -> None:
    """Replace closed streams by ones that hold nothing, and let no character be too much for a terminal's encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order each gets its own number, so that no file of a store does, and with it what libraries print.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Not one that was replaced just now, or by others: its number would be free for a file when it is dropped here.
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        raw = io.BufferedWriter(_Messages(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", line_buffering=True)


class _Messages(io.FileIO):
    """Standard error: where it cannot be written, as on a full disk, the status still says what it has to."""

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - bytes of any kind, as the base class has it
        """Write some of it; where that fails, let it go."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _leave(status: int) -> None:
    # What could not be written stays in the buffer, and would be an error again when the interpreter ends.
    sys.stdout = None
    sys.exit(status)
