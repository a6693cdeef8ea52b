"""Lets ``python -m asymcheck`` be the command line."""

from asymcheck.cli.main import main

main()
