"""URIs of checkpoints, for programs that only take a path: ``asymcheck:///path/of/store?run=RUN/step-100``."""

from __future__ import annotations

import dataclasses
import os
import re
from urllib.parse import parse_qsl

from asymcheck.errors import InvalidInputError
from asymcheck.format.layout import check_run
from asymcheck.validation import check_step

_SCHEME = "asymcheck:/"
# pathlib leaves only one of the slashes after the scheme.
_FORM = re.compile(r"asymcheck:(?://)?(/[^/?][^?]*)\?([^/]*)(?:/([^/]*?(\d+))?)?")
_STRICT = {"0": False, "1": True}


def is_checkpoint_uri(value: object) -> bool:
    """Tell whether a value is meant as the URI of a checkpoint."""
    return isinstance(value, (str, os.PathLike)) and str(value).startswith(_SCHEME)


@dataclasses.dataclass(frozen=True)
class CheckpointURI:
    """Parsed URI of a checkpoint, or of a run."""

    location: str
    """Absolute path of the store."""
    run: str
    """Name of the run."""
    step: int | None = None
    """The step; None if the URI names a run."""
    strict: bool = False
    """Option ``strict=1``, see :class:`asymcheck.integrations.dcp.AsymcheckReader`."""
    tensors: str = "*"
    """Option ``tensors=GLOB``, as above."""

    @classmethod
    def parse(cls, uri: object) -> CheckpointURI:
        """Parse a URI.

        Raises:
            InvalidInputError: the URI has another form.
        """
        form = _FORM.fullmatch(str(uri))
        options = dict(parse_qsl(form[2], keep_blank_values=True)) if form else {}
        if form is None or "run" not in options or not options.keys() <= {"run", "strict", "tensors"}:
            raise InvalidInputError(
                f"invalid checkpoint URI {str(uri)!r:.200}: give asymcheck:///PATH/OF/STORE?run=RUN for a run, or "
                "asymcheck:///PATH/OF/STORE?run=RUN/step-100 for a checkpoint. The path is absolute, the last part "
                "ends with the step, and the options are &strict=1 and &tensors=GLOB"
            )
        if options.get("strict", "0") not in _STRICT:
            raise InvalidInputError(f"checkpoint URI {str(uri)!r:.200}: strict is 0 or 1")
        step = None if form[4] is None else check_step(int(form[4]))
        strict = _STRICT[options.get("strict", "0")]
        return cls(os.path.normpath(form[1]), check_run(options["run"]), step, strict, options.get("tensors", "*"))
