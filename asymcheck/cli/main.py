"""The group of commands, and how errors become messages and exit statuses."""

from __future__ import annotations

import sys

import click

from asymcheck.cli.exits import status_of
from asymcheck.cli.inspect_command import inspect
from asymcheck.cli.rebuild_command import rebuild
from asymcheck.cli.verify_command import verify
from asymcheck.config import __version__
from asymcheck.errors import AsymcheckError


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except AsymcheckError as error:
            click.echo(f"asymcheck: {error}", err=True)
            ctx.exit(status_of(error))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="asymcheck")
def commands() -> None:
    """Look at, check and use asymcheck checkpoint stores.

    A store is a directory that a training loop saves to with asymcheck.Store or asymcheck.Checkpointer.
    """


commands.add_command(inspect)
commands.add_command(rebuild)
commands.add_command(verify)


def main() -> None:
    """Run the command line."""
    sys.exit(commands())
