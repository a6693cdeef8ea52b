"""Test that errors cross process boundaries, because DCP pickles them between ranks."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Sequence

import pytest

from asymcheck import errors
from asymcheck.errors import AsymcheckError, CaptureWarning, warn_user

_ARGUMENTS = {
    "path": "model.weight",
    "reason": "no bytes",
    "problem": "truncated",
    "remedy": "fetch the file again",
    "message": "it failed",
    "digest": bytes(16),
    "reasons": ("a", "b"),
    "overwritten": ("x",),
    "next_step": 3,
    "missing": (1, 2),
    "is_empty": True,
    "run": "gpt2",
    "trainer": "process 7 on host node1",
    "last_step": 12,
    "taken_over": True,
}
PUBLIC = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, (AsymcheckError, Warning))
]


def _made(kind: type[BaseException]) -> BaseException:
    constructor = kind.__init__
    if not inspect.isfunction(constructor):
        return kind("it failed")
    return kind(**{name: _ARGUMENTS[name] for name in list(inspect.signature(constructor).parameters)[1:]})


@pytest.mark.parametrize("kind", PUBLIC)
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_every_public_error_survives_pickling(kind: type[BaseException], copied: object) -> None:
    """Test the class, the message and the fields."""
    assert callable(copied)
    error = _made(kind)
    twin = copied(error)
    assert type(twin) is kind
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))


def _warn_on_a_thread() -> None:
    thread = threading.Thread(target=warn_user, args=("torn", CaptureWarning))
    thread.start()
    thread.join()


def test_warning_of_a_background_thread_points_at_no_library() -> None:
    """Test that a warning does not quote a line of Python's own threading module."""
    with pytest.warns(CaptureWarning, match="torn") as caught:
        _warn_on_a_thread()
    # Newer versions of Python write <sys>.
    assert caught[0].filename.strip("<>") == "sys"


def test_every_field_is_tested() -> None:
    """Test that the arguments above include every field of every error."""
    fields: Sequence[str] = [name for kind in PUBLIC for name in vars(_made(kind))]
    assert set(fields) >= {"path", "reason", "remedy", "digest", "reasons", "overwritten", "next_step", "missing"}
