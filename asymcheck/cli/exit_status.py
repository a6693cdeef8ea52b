"""Exit statuses, shared by all commands and listed in each command's help."""

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
  0  success
  1  damage found, and at least one checkpoint is lost
  2  invalid command line
  3  store, checkpoint, capture or file not found
  4  the store or checkpoint cannot be read
  5  operating system error
  6  damage found, but no checkpoint is lost; or a newer
     checkpoint was skipped
 70  internal error of asymcheck: please report it
130  interrupted
"""


def status_of(error: AsymcheckError) -> int:
    """Return the exit status of an error."""
    if isinstance(error, InvalidInputError):
        return USAGE
    if isinstance(error, NotFoundError):
        return NOT_FOUND
    return UNREADABLE if isinstance(error, (FormatError, RecoveryError)) else STORAGE
