"""Stand for Google Cloud Storage on 127.0.0.1 in tests: SeaweedFS behind a proxy.

No free server has the interface of Google with conditional puts: fake-gcs-server refuses them. Requests of its client
differ from those for S3 only in signatures and in the header of a conditional put, which the proxy translates. Hence
requests and answers are real, but credentials and the error texts of the service are not tested.
"""

from __future__ import annotations

from pathlib import Path

from tools.local_objects import LocalObjects, Proxy

_CONDITION = "x-goog-if-generation-match"


def variables(endpoint: str) -> dict[str, str]:
    """Return the environment variable with which a client finds the server at ``endpoint``."""
    return {"STORAGE_EMULATOR_HOST": endpoint}


def _as_s3(_method: str, _path: str, headers: dict[str, str]) -> None:
    # Another proxy before this one changes the case of names.
    for name in [name for name in headers if name.lower() in ("authorization", _CONDITION)]:
        if headers.pop(name) == "0" and name.lower() == _CONDITION:
            headers["if-none-match"] = "*"


class LocalGcs:
    """Server with its data in a folder. Use it in a ``with`` block, which stops the server."""

    def __init__(self, folder: Path) -> None:
        self._server = LocalObjects(folder, has_users=False)
        self._proxy = Proxy(self._server.endpoint, _as_s3)
        self.endpoint = self._proxy.endpoint

    def __enter__(self) -> LocalGcs:
        self._server.__enter__()
        self._proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.__exit__()
        self._server.__exit__()
