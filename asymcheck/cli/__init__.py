"""Command-line interface of asymcheck."""

from asymcheck.cli.main import main

__all__ = ["main"]
