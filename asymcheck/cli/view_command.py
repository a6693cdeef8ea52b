"""``asymcheck view``: serve a page about a store, or write it to a file."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

import click

from asymcheck.cli import exit_status, output
from asymcheck.cli.inspect_command import inspect
from asymcheck.cli.options import ReportCommand, ring_folder_option, show_remote_option, store_argument
from asymcheck.cli.reports import diff, du
from asymcheck.cli.verify_command import verify
from asymcheck.config import DEFAULT_RUN
from asymcheck.convert.export_target import Draft
from asymcheck.errors import InvalidInputError

_COMMANDS: dict[str, ReportCommand] = {"diff": diff, "du": du, "inspect": inspect, "verify": verify}


@click.command(epilog=exit_status.HELP, short_help="Show a store in a web page.")
@store_argument
@show_remote_option
@ring_folder_option
@click.option("--trace", type=click.Path(path_type=Path), help="Also show a file of asymcheck.trace().")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1 [default: a free port].")
@click.option("--open", "opens", is_flag=True, help="Open the page in the web browser.")
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the page to one HTML file instead. It contains all data and works offline.",
)
@click.option("--overwrite", is_flag=True, help="With --export: replace an existing file.")
@click.option("--verify", "verifies", is_flag=True, help="With --export: read and check every byte first.")
@click.option("--compare", nargs=2, metavar="A B", help="With --export: compare two checkpoints, as 'asymcheck diff'.")
@click.option("--run", default=DEFAULT_RUN, show_default=True, help="With --compare: run of A and B.")
def view(
    store: str,
    remote: str | None,
    ring_folder: Path,
    trace: Path | None,
    port: int,
    opens: bool,
    export: Path | None,
    overwrite: bool,
    verifies: bool,
    compare: tuple[str, str] | None,
    run: str,
) -> None:
    """Show STORE in a local, read-only web page: runs, metrics, disk usage, health, differences and stalls.

    The page follows a store to which a training saves. The server listens on 127.0.0.1 only, and its URL contains a
    random token. Press Ctrl-C to stop it.
    """
    # Other commands do not need an HTTP server.
    from asymcheck.view.documents import Documents
    from asymcheck.view.page import static_page
    from asymcheck.view.server import PageServer

    if export is None and (verifies or compare):
        raise click.UsageError("--verify and --compare require --export; the served page has buttons for both")
    if export is None and overwrite:
        raise click.UsageError("--overwrite requires --export")
    if export is not None and (opens or port):
        raise click.UsageError("--export starts no server: leave out --open and --port")
    with contextlib.closing(Documents(store, remote, ring_folder, trace, document_of)) as documents:
        if export is not None:
            if export.exists() and not export.is_file():
                raise InvalidInputError(f"cannot replace {export}: it is not a file; choose another name")
            # Refused before a verification, which may take hours.
            draft = Draft(export, overwrite=overwrite)
            page = static_page(documents.collect(verify=verifies, compare=compare and (run, *compare))).encode()
            try:
                draft.file(size=len(page)).write(0, page)
                draft.publish()
            finally:
                draft.discard()
            click.echo(f"{export}: {output.size(len(page))}")
            return
        with PageServer(documents, port) as server:
            click.echo(server.url)
            if opens:
                webbrowser.open(server.url)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()


def document_of(command: str, **options: object) -> object:
    """Return the document that a command prints with ``--json``; ``options`` are all its options."""
    return _COMMANDS[command].report(**options).document
