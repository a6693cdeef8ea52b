"""Run Azurite, Microsoft's emulator of Azure Blob Storage, on 127.0.0.1 for tests.

``make node`` installs it. Azurite writes its metadata every few seconds, so a killed server loses the last objects.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import subprocess
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

from tools.processes import free_ports, installed

CONTAINER = "checkpoints"
KEY = base64.b64encode(b"a password for tests").decode()
_ACCOUNT = "local"
_PROGRAM = Path(__file__).with_name("azurite") / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
_START_S = 60.0


def is_installed() -> bool:
    """Tell whether Node and Azurite are installed."""
    return _PROGRAM.exists() and installed("node") is not None


def variables(endpoint: str) -> dict[str, str]:
    """Return the environment variables with which a client finds the server at ``endpoint``."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{_ACCOUNT}",
    }


class LocalAzure:
    """Azurite with its data in a folder. Use it in a ``with`` block, which stops the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self._port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self._port}"
        folder.mkdir(parents=True)

    def __enter__(self) -> LocalAzure:
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *(str(installed("node")), str(_PROGRAM), "--location", str(self._folder / "data"), "--silent"),
                    *("--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--disableTelemetry"),
                    # The client may be newer than the emulator.
                    "--skipApiVersionCheck",
                ],
                env={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{KEY}"},
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _START_S
        while not self._has_made_container():
            if self._server.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError(f"Azurite did not start: see {self._folder / 'server.log'}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()

    def _has_made_container(self) -> bool:
        """Create the container; False if the server does not answer yet."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
        # The account is in the canonical resource and in the path of an emulator.
        signed += f"/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}\nrestype:container"
        digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{_ACCOUNT}/{CONTAINER}?restype=container"
        request = urllib.request.Request(url, headers=headers, method="PUT")  # noqa: S310 - a URL of this machine
        try:
            with urllib.request.urlopen(request, timeout=5):  # noqa: S310 - as above
                return True
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
