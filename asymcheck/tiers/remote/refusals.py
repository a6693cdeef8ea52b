"""What clients of remote file systems say when they refuse, as errors of ours.

They have no error classes worth the name: hdfs-native gives OSError and RuntimeError, libhdfs what Java printed. So the
text decides, and what it does not tell is taken for "unreachable": an error that stops, and is never taken for damage.
"""

from __future__ import annotations

import errno

from asymcheck.errors import (
    OutOfSpaceError,
    ReadOnlyStoreError,
    RemoteUnreachableError,
    StorageError,
    TooManyFilesError,
)

_FULL = ("quotaexceeded", "quota of", "quota is exceeded", "no space left", "not enough space")
_DENIED = ("permission denied", "accesscontrol", "access denied", "unauthorized", "forbidden")
_SAFE_MODE = ("safemode", "safe mode")
_DAMAGED = ("checksum",)
_READS = ("look at ", "list ", "read ")
_AWAY = {
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
    *(errno.ENETUNREACH, errno.ENETRESET, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN),
    *(errno.EPIPE, errno.ENOLINK, errno.ECOMM, errno.ENODEV, errno.ENXIO, errno.EAGAIN, errno.ENOMEM),
}
"""What the kernel says when the server of a mounted file system, the network, or memory is not there."""


def refusal(what: str, error: Exception, *, is_local: bool) -> StorageError:
    """Return the error for what a client raised when it was to do ``what``."""
    text = _short(str(error))
    number = getattr(error, "errno", None)

    def says(*signs: str) -> bool:
        return any(sign in text.lower() for sign in signs)

    # Who may not look knows nothing of what is there.
    denied = (RemoteUnreachableError, "look") if what.startswith(_READS) else (ReadOnlyStoreError, "do that")
    cases: tuple[tuple[bool, type[StorageError], str], ...] = (
        (says(*_SAFE_MODE), RemoteUnreachableError, "; HDFS is in safe mode: try again when it has left it"),
        (
            number in (errno.ENOSPC, errno.EDQUOT) or says(*_FULL),
            OutOfSpaceError,
            "; free space or raise the quota there, or delete checkpoints and run gc on it",
        ),
        (
            number in (errno.EACCES, errno.EPERM, errno.EROFS) or says(*_DENIED),
            denied[0],
            f"; this user may not {denied[1]} there",
        ),
        (
            number in (errno.EMFILE, errno.ENFILE),
            TooManyFilesError,
            "; raise the limit of open files (ulimit -n)",
        ),
        (
            number == errno.ENOTDIR,
            StorageError,
            "; a file is where a directory is meant: name another location",
        ),
        (number in _AWAY, RemoteUnreachableError, ""),
        ((is_local and isinstance(error, OSError)) or says(*_DAMAGED), StorageError, ""),
        (True, RemoteUnreachableError, ""),
    )
    return next(kind(f"{what}: {text}{advice}") for applies, kind, advice in cases if applies)


def _short(text: str) -> str:
    """Return what comes before the stack: Java adds where it was when it failed, and that has any word in it."""
    for sign in ("\\n\\tat ", "\n\tat "):
        text = text.split(sign, 1)[0]
    return " ".join(text.replace("\\n", " ").split())[:500] or "it gave no reason"
