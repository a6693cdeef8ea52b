"""The command line: each command parses its options, calls the library and prints."""

from asymcheck.cli.main import main

__all__ = ["main"]
