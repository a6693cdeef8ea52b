"""Exit statuses: the same for every command, listed in every command's help."""

from __future__ import annotations

from asymcheck.errors import AsymcheckError, FormatError, InvalidInputError, NotFoundError, RecoveryError

OK = 0
DAMAGED = 1
USAGE = 2
NOT_FOUND = 3
UNREADABLE = 4
STORAGE = 5
WARNINGS = 6
DEFECT = 70
INTERRUPTED = 130

HELP = """\b
Exit status:
  0  all is well
  1  damage was found that costs a checkpoint
  2  the command line is wrong
  3  there is no such store, checkpoint, capture or file
  4  the store or checkpoint cannot be read
  5  the operating system refused
  6  damage was found, but no checkpoint is lost; also: a newer
     checkpoint was passed over
 70  a defect of asymcheck: please report it
130  it was interrupted
"""


def status_of(error: AsymcheckError) -> int:
    """Return the exit status for an error."""
    for kind, status in (
        (InvalidInputError, USAGE),
        (NotFoundError, NOT_FOUND),
        (FormatError, UNREADABLE),
        (RecoveryError, UNREADABLE),
    ):
        if isinstance(error, kind):
            return status
    return STORAGE
