"""The command line: one command a file, each parses, calls the library and prints."""

from asymcheck.cli.main import main

__all__ = ["main"]
