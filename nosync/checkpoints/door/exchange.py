"""What a request of WebHDFS says, and what is sent back: HTTP as ASGI has it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from nosync.checkpoints.door.remote_errors import RemoteError, illegal, refused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY_BYTES = 64 << 30
"""A larger file is refused. The snapshot of a partition's whole state is one file."""
BODY_TIMEOUT_S = 60.0
"""The next piece of a body has to come within so long."""
_PIECE_BYTES = 256 << 10
_MOST_PARAMETERS = 64
BODY_FOLLOWS = "body"
"""The parameter of the address that a file is sent to."""


@dataclass(frozen=True)
class Limits:
    """What a request may need."""

    body_bytes: int = MOST_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S


class GoneError(Exception):
    """The client went away in the middle of its request: nobody waits for an answer."""


@dataclass(frozen=True)
class Answer:
    """What is sent back: bytes, or a part of a file."""

    status: int = 200
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    file: tuple[int, int, int] | None = None
    """A descriptor, which is closed when all is sent, and from where and how many bytes."""


def json_answer(said: Mapping[str, Any]) -> Answer:
    """Returns an answer that is JSON."""
    return Answer(body=json.dumps(said, separators=(",", ":")).encode())


class Request:
    """One request, taken apart."""

    def __init__(self, scope: Scope, receive: Receive, limits: Limits) -> None:
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        self.raw_query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.scheme: str = scope["scheme"]
        self._receive, self._limits = receive, limits
        try:
            pairs = parse_qsl(
                self.raw_query.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS, errors="strict"
            )
        except ValueError:
            raise illegal("the parameters are not those of a URL") from None
        self.parameters: dict[str, str] = dict(pairs)

    def text(self, name: str, default: str = "") -> str:
        """Returns a parameter."""
        return self.parameters.get(name, default)

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a parameter that is true or false."""
        found = self.text(name).lower()
        if found not in ("", "true", "false"):
            raise illegal(f"{name} is {found[:32]!r}: expected true or false")
        return found == "true" if found else default

    def number(self, name: str) -> int | None:
        """Returns a parameter that is a number from 0; None without it."""
        found = self.text(name)
        if not found or found == "null":
            return None
        if not (found.isascii() and found.isdigit() and len(found) < 19):
            raise illegal(f"{name} is {found[:32]!r}: expected a number from 0")
        return int(found)

    def has_body_next(self) -> bool:
        """Returns whether the client was sent here with its file."""
        return self.text(BODY_FOLLOWS) == "true"

    async def body(self) -> AsyncIterator[bytes]:
        """Yields the pieces of the body. Raises RemoteError where it is too large, or does not come."""
        most, total = self._limits.body_bytes, 0
        said = self.headers.get(b"content-length", b"")
        if said.isdigit() and int(said) > most:
            raise _too_large(most)
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), self._limits.body_timeout_s)
            except TimeoutError:
                raise refused("the rest of the file did not come in time", 408, ends_connection=True) from None
            if message["type"] != "http.request":
                raise GoneError
            piece = message.get("body", b"")
            total += len(piece)
            if total > most:
                raise _too_large(most)
            if piece:
                yield piece
            if not message.get("more_body", False):
                return


def _too_large(most: int) -> RemoteError:
    return refused(f"a file has at most {most:,} bytes here", 413, ends_connection=True)


async def send_answer(answer: Answer, send: Send) -> None:
    """Sends an answer, a file of any size in pieces."""
    length = len(answer.body) if answer.file is None else answer.file[2]
    headers = [*answer.headers, (b"content-length", str(length).encode())]
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if answer.file is not None:
            await _send_file(*answer.file, send)
        await send({"type": "http.response.body", "body": answer.body})
    finally:
        if answer.file is not None:
            os.close(answer.file[0])


async def _send_file(fd: int, offset: int, length: int, send: Send) -> None:
    end = offset + length
    while offset < end:
        piece = os.pread(fd, min(_PIECE_BYTES, end - offset), offset)
        if not piece:  # published files are never written again, so the disk is at fault
            raise OSError("a file ended early")
        offset += len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
