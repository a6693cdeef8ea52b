"""HTTP server of the page: read-only, on the loopback interface, behind a random token."""

from __future__ import annotations

import http.server
import json
import secrets
import sys
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from asymcheck.errors import AsymcheckError, StorageError
from asymcheck.view.documents import Documents
from asymcheck.view.page import FILES, SERVED_POLICY, read

_ADDRESS = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": SERVED_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_IDLE_S = 60


class PageServer(http.server.ThreadingHTTPServer):
    """Server of one page. Each request has a thread."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, documents: Documents, port: int) -> None:
        """Listen on ``port`` of 127.0.0.1; 0 selects a free port.

        Raises:
            StorageError: the port is in use or not permitted.
        """
        self.documents = documents
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except OSError as error:
            raise StorageError(
                f"cannot listen on {_ADDRESS}:{port}: {error.strerror}; choose another port, or 0 for a free one"
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in (_ADDRESS, "localhost")}

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of a defect. A browser that closes its connection is none."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # only printed

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{_ADDRESS}:{self.server_port}/{self.token}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def version_string(self) -> str:
        return "asymcheck"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name in the base class
        pass  # The request line has the token.

    def do_GET(self) -> None:
        # A web site whose name resolves to 127.0.0.1 could read the page otherwise (DNS rebinding).
        if self.headers.get("Host", "") not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "unknown host")
            return
        url = urlsplit(self.path)
        token, _, name = url.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "wrong token: use the URL that asymcheck view printed")
        elif not name:
            self._send(HTTPStatus.OK, "text/html", read("page.html"))
        elif name in FILES:
            self._send(HTTPStatus.OK, FILES[name], read(name))
        else:
            self._send_document(name.removeprefix("api/"), dict(parse_qsl(url.query)))

    do_HEAD = do_GET  # noqa: N815 - name in the base class

    def _send_document(self, name: str, query: dict[str, str]) -> None:
        status = HTTPStatus.OK
        try:
            document = self.server.documents.get(name, query)
        except AsymcheckError as error:
            status, document = HTTPStatus.CONFLICT, {"error": str(error)}
        if document is None:
            status, document = HTTPStatus.NOT_FOUND, {"error": f"no document {name!r:.100}"}
        self._send(status, "application/json", json.dumps(document, allow_nan=False, separators=(",", ":")))

    def _send(self, status: HTTPStatus, media_type: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for header, value in _HEADERS.items():
            self.send_header(header, value)
        self.send_header("Content-Type", f"{media_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
