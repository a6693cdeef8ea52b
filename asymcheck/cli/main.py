"""Entry point of the command line: registers the commands and turns errors into messages and exit statuses."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import shell_complete

from asymcheck.cli import output
from asymcheck.cli.doctor_command import doctor
from asymcheck.cli.exit_status import DEFECT, HELP, INTERRUPTED, STORAGE, WARNINGS, status_of
from asymcheck.cli.inspect_command import inspect
from asymcheck.cli.maintenance import delete, gc, rebuild_catalog
from asymcheck.cli.merge_command import merge
from asymcheck.cli.publish_commands import publish, subscribe
from asymcheck.cli.reports import diff, du, log
from asymcheck.cli.transfer import convert, pull, push, restore
from asymcheck.cli.verify_command import merge_reports, verify
from asymcheck.cli.view_command import view
from asymcheck.config import __version__
from asymcheck.errors import AsymcheckError, AsymcheckWarning, SkippedCheckpointWarning


@click.command(epilog=HELP, short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that adds completion of asymcheck's commands, options and paths to SHELL.

    \b
    bash: eval "$(asymcheck completion bash)"                        in ~/.bashrc
    zsh:  eval "$(asymcheck completion zsh)"                         in ~/.zshrc
    fish: asymcheck completion fish > ~/.config/fish/completions/asymcheck.fish
    """
    shell_complete(ctx.find_root().command, {}, "asymcheck", "_ASYMCHECK_COMPLETE", f"{shell}_source")


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> NoReturn:
        try:
            with _warnings_as_notes() as noted, _waits_as_notes():
                status = super().invoke(ctx)
            if not status and SkippedCheckpointWarning in noted:
                status = WARNINGS
            ctx.exit(status or 0)
        except AsymcheckError as error:
            output.note(str(error))
            ctx.exit(status_of(error))
        except KeyboardInterrupt:
            # The default status of click is 1, which here means a lost checkpoint.
            output.note("interrupted")
            ctx.exit(INTERRUPTED)


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[set[type[Warning]]]:
    """Print the package's warnings as messages, without a source line; yield the set of their categories."""
    noted: set[type[Warning]] = set()
    with warnings.catch_warnings():
        default_showwarning = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
            if issubclass(category, AsymcheckWarning):
                output.note(str(message))
                noted.add(category)
            else:
                default_showwarning(message, category, *args, **kwargs)

        warnings.showwarning = show
        warnings.simplefilter("always", AsymcheckWarning)
        yield noted


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        output.note(record.getMessage())


@contextlib.contextmanager
def _waits_as_notes() -> Iterator[None]:
    """Print messages about a remote location that does not answer, and about a lock."""
    logger, handler = logging.getLogger("asymcheck.storage"), _NoteHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="asymcheck")
def commands() -> None:
    """Inspect, verify, repair and convert asymcheck checkpoint stores.

    A store is a directory to which a training loop saves with asymcheck.Store or asymcheck.Checkpointer. The commands
    inspect, log, diff, verify, restore, view, delete and gc also accept a remote location, such as
    hdfs://namenode:8020/runs/gpt2.
    """


for _command in (
    *(completion, convert, delete, diff, doctor, du, gc, inspect, log),
    *(merge, merge_reports, publish, pull, push, rebuild_catalog, restore, subscribe, verify, view),
):
    commands.add_command(_command)


def main() -> None:
    """Run the command line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _exit_on_signal)
    _prepare_streams()
    try:
        try:
            commands()
        finally:
            sys.stdout.flush()
    except OSError as error:
        click.echo(f"asymcheck: cannot write the output: {error}", err=True)
        _exit_without_flush(STORAGE)
    except Exception:  # noqa: BLE001 - Python's own status is 1, which here means a lost checkpoint
        traceback.print_exc()
        _exit_without_flush(DEFECT)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    # SystemExit unwinds the stack, so that unfinished files are removed.
    sys.exit(128 + number)


def _prepare_streams() -> None:
    """Reopen closed standard streams on /dev/null, and escape characters that the terminal cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Each stream gets its own descriptor number. Otherwise a file of the store could get number 1 or 2, and
            # libraries would print into that file.
            setattr(sys, name, open(os.devnull, mode, errors="backslashreplace"))  # noqa: SIM115 - open until exit
    # A replaced stream stays: dropping the stream would close its descriptor, and free the number for another file.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        buffer = io.BufferedWriter(_PipeStdout(sys.stdout.fileno(), "w", closefd=False))
        is_terminal = sys.stdout.line_buffering
        sys.stdout = io.TextIOWrapper(buffer, sys.stdout.encoding, "backslashreplace", line_buffering=is_terminal)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        # No buffer: a signal handler may raise at the end of a write, and the buffer would be written again at exit.
        raw = _LossyStderr(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "backslashreplace", write_through=True)


class _PipeStdout(io.FileIO):
    """Standard output that ends the program quietly in `asymcheck log STORE | head`, as other programs end.

    The default action of SIGPIPE would also end the program when a server or a browser closes a connection.
    """

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - signature of the base class
        """Write bytes, or exit if the reader of the pipe has ended."""
        try:
            return super().write(data)
        except BrokenPipeError:
            # Buffered output is written again at exit.
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self.fileno())
            sys.exit(128 + signal.SIGPIPE)


class _LossyStderr(io.FileIO):
    """Standard error that drops output when a write fails, so that the exit status stays right on a full disk."""

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - signature of the base class
        """Write all bytes, and drop the rest if that fails."""
        left = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            while left:
                left = left[super().write(left) :]
        return memoryview(data).nbytes


def _exit_without_flush(status: int) -> None:
    # Python would flush the buffer again at exit, and fail again.
    sys.stdout = None
    sys.exit(status)
