"""Run an SFTP server on 127.0.0.1 for tests, in a thread of this process: the one of asyncssh.

Its users see a folder as the root, and may need the password ``secret``.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import asyncssh

PASSWORD = "secret"  # noqa: S105 - of a server for tests
VARIABLES = {"FSSPEC_SSH_PASSWORD": PASSWORD}
"""Environment variables from which fsspec gets the password when it is imported."""


class _Connection(asyncssh.SSHServer):
    def __init__(self, server: LocalSftp) -> None:
        """Belong to a server."""
        self._server = server

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        """Remember the connection."""
        self._server.connections.append(conn)

    def begin_auth(self, _: str) -> bool:
        """Tell whether a user must authenticate."""
        return self._server.needs_password

    def password_auth_supported(self) -> bool:
        """Tell that passwords are accepted."""
        return True

    def validate_password(self, _: str, password: str) -> bool:
        """Check a password."""
        return password == PASSWORD


class LocalSftp:
    """Server for one folder. Use it in a ``with`` block, which stops the server."""

    def __init__(self, folder: Path, *, needs_password: bool = False) -> None:
        """Serve ``folder``."""
        self._folder = folder
        self.needs_password = needs_password
        self.connections: list[asyncssh.SSHServerConnection] = []
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Return the location of the folder."""
        return f"fsspec+ssh://trainer@127.0.0.1:{self.port}"

    @property
    def known_host(self) -> str:
        """Return the line of a file of known hosts."""
        return f"[127.0.0.1]:{self.port} {self._key.export_public_key().decode()}"

    def __enter__(self) -> LocalSftp:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listen, on the same port as before."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """Close all connections, and listen no more."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    def _files(self, channel: asyncssh.SSHServerChannel[bytes]) -> asyncssh.SFTPServer:
        return asyncssh.SFTPServer(channel, chroot=str(self._folder).encode())

    async def _start(self) -> None:
        self._acceptor = await asyncssh.create_server(
            partial(_Connection, self), "127.0.0.1", self.port, server_host_keys=[self._key], sftp_factory=self._files
        )
        self.port = self._acceptor.get_port()

    async def _stop(self) -> None:
        assert self._acceptor is not None
        self._acceptor.close()
        await self._acceptor.wait_closed()
        for connection in self.connections:
            connection.abort()
            await connection.wait_closed()
        self.connections.clear()
