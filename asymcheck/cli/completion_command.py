"""``asymcheck completion``: what a shell needs to complete commands, options and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from asymcheck.cli import exits

_PROGRAM = "asymcheck"
_VARIABLE = "_ASYMCHECK_COMPLETE"


@click.command(epilog=exits.HELP, short_help="Print the script that makes a shell complete asymcheck's commands.")
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
