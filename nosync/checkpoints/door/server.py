"""The HTTP server of a door: uvicorn, in a thread. Nothing else knows it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nosync.lsm.errors import InvalidInputError

log = logging.getLogger("nosync")

HEAD_TIMEOUT_S = 30.0
"""The head of a request has to be there so long after the connection, or after the first byte of it."""
_KEEP_ALIVE_S = 75
"""Longer than any client keeps a connection that it does not use: so it is not closed under the client's next request."""
_GRACE_S = 5
_MOST_CONNECTIONS = 1024
_FEWEST_CONNECTIONS = 16
_FOR_OTHERS = 128
"""So many descriptors are left to what is not a connection. Half of the rest are for the files that connections read."""
_SAY_AGAIN_S = 60.0


@dataclass(frozen=True)
class Tls:
    """The files of a server that is met from other hosts. `ca`: callers have to show a certificate of it."""

    certificate: Path
    key: Path
    ca: Path | None = None


def is_loopback(host: str) -> bool:
    """Returns whether an address is met from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """A server that listens. It answers between `start` and `close`."""

    def __init__(self, host: str, port: int, tls: Tls | None = None, *, head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        """Raises InvalidInputError where it cannot listen there, or may not: without TLS, loopback alone is safe."""
        if tls is None and not is_loopback(host):
            raise InvalidInputError(
                f"{host} can be met from other hosts, and who listens there would see the secret: give a certificate and its "
                "key, or listen on 127.0.0.1"
            )
        self._tls, self._head_timeout_s = tls, head_timeout_s
        self._socket = _listening(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """The address of the file system."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'webhdfs' if self._tls is None else 'swebhdfs'}://{host}:{self.port}"

    def start(self, app: Callable[..., Any]) -> None:
        """Answers requests by an ASGI application. Raises InvalidInputError where the certificates are none."""
        tls = self._tls
        config = uvicorn.Config(
            app,
            http=cast(Any, _protocol(self._head_timeout_s)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_most_connections(),
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=None if tls is None else str(tls.certificate),
            ssl_keyfile=None if tls is None else str(tls.key),
            ssl_ca_certs=None if tls is None or tls.ca is None else str(tls.ca),
            ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.ca is None else ssl.CERT_REQUIRED,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            self._socket.close()
            files = [] if tls is None else [tls.certificate, tls.key, *([tls.ca] if tls.ca else [])]
            missing = next((f"{path} is not there" for path in files if not path.exists()), None)
            shown = missing or f"{', '.join(map(str, files))}: {error}; expected PEM files that belong together"
            raise InvalidInputError(f"the certificate, its key or the CA cannot be used: {shown}") from error
        self._server = uvicorn.Server(config)
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._server, started), name="nosync-door", daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, server: uvicorn.Server, started: threading.Event) -> None:
        async def serve() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(_Complaints())
            loop.call_soon(started.set)
            await server.serve(sockets=[self._socket])

        try:
            asyncio.run(serve())
        except Exception:
            log.exception("the door's server ended")
        finally:
            started.set()

    def is_running(self) -> bool:
        """Returns whether requests are answered."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Answers what was asked, and ends."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        self._socket.close()


class _Complaints:
    """Logs what the event loop complains of: once in a while, where it complains again and again."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif loop.time() - self._last_s >= _SAY_AGAIN_S:
            self._last_s = loop.time()
            log.warning("the door: %s: %s", context.get("message"), error.strerror or error)


def _most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_FEWEST_CONNECTIONS, min(_MOST_CONNECTIONS, (soft - _FOR_OTHERS) // 2))


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises InvalidInputError where that cannot be."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InvalidInputError(f"port {port!r}: expected 0 (any) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidInputError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # who connects before the first answer waits
    except OSError as error:
        listening.close()
        what = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror or error
        raise InvalidInputError(f"cannot listen on {host}:{port}: {what}") from error
    return listening


def _protocol(head_timeout_s: float) -> type[H11Protocol]:
    """Returns uvicorn's protocol, with a time limit for the head of a request, which uvicorn has not."""

    class WithHeadTimeout(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > (self.limit_concurrency or _MOST_CONNECTIONS):
                transport.abort()  # an answer would need another descriptor, and whoever waits here says nothing
                return
            self._deadline = self.loop.call_later(head_timeout_s, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
            if not has_begun and self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            elif has_begun and self._deadline is None:
                self._deadline = self.loop.call_later(head_timeout_s, self.transport.close)

        def _unsupported_upgrade_warning(self) -> None:
            """An answer of HTTP follows, and uvicorn's advice is for others than who runs a door."""

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

    return WithHeadTimeout
