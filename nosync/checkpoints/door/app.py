"""The door as an ASGI application: WebHDFS, as far as a checkpoint needs it.

No answer has a `Content-Type`: the Hadoop client that pyspark ships would parse it with a class that pyspark does not
ship. A file is sent to another address than the one that is asked first, as the protocol has it; here that is the same
address with one more parameter. What is asked without a path, and so without the secret, gets the same constants
whoever asks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from nosync.checkpoints.door.file_operations import BLOCK_BYTES, directory_status
from nosync.checkpoints.door.places import PREFIX, Place, place_of_path, place_of_target
from nosync.checkpoints.door.remote_errors import RemoteError, denied, illegal, refused, unsupported
from nosync.checkpoints.door.served_checkpoints import ServedCheckpoint, ServedCheckpoints
from nosync.lsm.errors import NosyncError

log = logging.getLogger("nosync")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY_BYTES = 64 << 30
"""A larger file is refused. The snapshot of a partition's whole state is one file."""
BODY_TIMEOUT_S = 60.0
"""The next piece of a body has to come within so long."""
_PIECE_BYTES = 256 << 10
_MOST_PARAMETERS = 64
_BODY_FOLLOWS = "body"
"""The parameter of the address that a file is sent to."""


@dataclass(frozen=True)
class Limits:
    """What a request may need."""

    body_bytes: int = MOST_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S


class _GoneError(Exception):
    """The client went away in the middle of its request: nobody waits for an answer."""


@dataclass(frozen=True)
class _Answer:
    """What is sent back: bytes, or a part of a file."""

    status: int = 200
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    file: tuple[int, int, int] | None = None
    """A descriptor, which is closed when all is sent, and from where and how many bytes."""


def _json(said: Mapping[str, Any]) -> _Answer:
    return _Answer(body=json.dumps(said, separators=(",", ":")).encode())


class _Request:
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
        self._parameters: dict[str, str] = dict(pairs)

    def text(self, name: str, default: str = "") -> str:
        """Returns a parameter."""
        return self._parameters.get(name, default)

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
        return self.text(_BODY_FOLLOWS) == "true"

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
                raise _GoneError
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


class DoorApp:
    """Answers requests. It is an ASGI application of HTTP alone."""

    def __init__(self, checkpoints: ServedCheckpoints, secret: str, limits: Limits | None = None) -> None:
        self._checkpoints, self._secret, self._limits = checkpoints, secret, limits or Limits()
        self._operations: dict[str, tuple[str, Callable[[_Request, Place], Awaitable[_Answer]]]] = {
            "CREATE": ("PUT", self._create),
            "DELETE": ("DELETE", self._delete),
            "GETFILELINKSTATUS": ("GET", self._status),
            "GETFILESTATUS": ("GET", self._status),
            "GETHOMEDIRECTORY": ("GET", self._home),
            "GETSERVERDEFAULTS": ("GET", self._defaults),
            "LISTSTATUS": ("GET", self._list),
            "MKDIRS": ("PUT", self._make_dirs),
            "OPEN": ("GET", self._open),
            "RENAME": ("PUT", self._rename),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever it is."""
        try:
            answer = await self._answer(scope, receive)
        except _GoneError:
            return
        await _send(answer, send)

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        try:
            if scope["type"] != "http":
                raise refused("the door speaks HTTP alone")
            return await self._operate(scope, receive)
        except RemoteError as error:
            headers = [(b"connection", b"close")] if error.ends_connection else []
            return _Answer(error.status, error.body(), headers)
        except NosyncError as error:
            return _Answer(403, refused(str(error)).body())
        except _GoneError:
            raise
        except Exception:  # a defect of ours: the query is told, and the door lives
            log.exception("the door could not answer a request (%s)", scope.get("method"))  # the rest has the secret
            return _Answer(500, refused("the door could not answer; its log says why").body())

    async def _operate(self, scope: Scope, receive: Receive) -> _Answer:
        raw_path: bytes = scope["raw_path"]
        if raw_path.rstrip(b"/") == PREFIX:  # the client asks so for what belongs to no path
            request = _Request(scope, receive, self._limits)
            if request.method == "GET" and request.text("op").upper() in ("GETHOMEDIRECTORY", "GETSERVERDEFAULTS"):
                return await self._operations[request.text("op").upper()][1](request, Place("", ""))
        place = place_of_target(raw_path, self._secret)
        request = _Request(scope, receive, self._limits)
        name = request.text("op").upper()
        if not name:
            raise illegal("say an operation: op=...")
        if name not in self._operations:
            raise unsupported(
                f"{name[:64]} is not done here: the door is for checkpoints of Structured Streaming queries"
            )
        method, operate = self._operations[name]
        if request.method != method:
            raise RemoteError(405, "java.lang.IllegalArgumentException", f"{name} is a {method} request")
        return await operate(request, place)

    async def _checkpoint(self, place: Place, *, may_make: bool = False) -> ServedCheckpoint:
        if not place.name:
            raise denied("say a checkpoint: the directory of all checkpoints is nobody's")
        return await self._checkpoints.of(place, may_make=may_make)

    async def _status(self, request: _Request, place: Place) -> _Answer:
        if not place.name:
            return _json({"FileStatus": directory_status()})
        return _json({"FileStatus": (await self._checkpoint(place)).files.status(place.path)})

    async def _list(self, request: _Request, place: Place) -> _Answer:
        if place.name:
            found = (await self._checkpoint(place)).files.list(place.path)
        else:
            found = [directory_status(name) for name in self._checkpoints.names()]
        return _json({"FileStatuses": {"FileStatus": found}})

    async def _make_dirs(self, request: _Request, place: Place) -> _Answer:
        if place.name:
            (await self._checkpoint(place, may_make=True)).files.make_dirs(place.path)
        return _json({"boolean": True})

    async def _delete(self, request: _Request, place: Place) -> _Answer:
        is_recursive = request.flag("recursive", default=False)
        try:
            checkpoint = await self._checkpoint(place)
        except RemoteError as error:
            if error.status != 404:
                raise
            return _json({"boolean": False})
        if place.path:
            done = await asyncio.to_thread(checkpoint.files.delete, place.path, is_recursive=is_recursive)
            return _json({"boolean": done})
        if not is_recursive:
            raise denied(f"{place.name} is a checkpoint: it is removed with all that is in it, or not at all")
        await self._checkpoints.forget(place)
        return _json({"boolean": True})

    async def _rename(self, request: _Request, place: Place) -> _Answer:
        target = place_of_path(request.text("destination"), self._secret)
        if not place.path or not target.path or place.name != target.name:
            raise denied("a file is renamed within its checkpoint")
        options = request.text("renameoptions").upper()
        if options not in ("", "NONE", "OVERWRITE"):
            raise illegal(f"renameoptions is {options[:32]!r}: expected NONE or OVERWRITE")
        checkpoint = await self._checkpoint(place)
        try:
            checkpoint.files.rename(place.path, target.path, may_overwrite=options == "OVERWRITE")
        except RemoteError as error:
            if options or error.status == 500:
                raise
            return _json({"boolean": False})  # the older form says no more
        await self._checkpoints.wait_at_gate(checkpoint, target.path)
        return _Answer() if options else _json({"boolean": True})

    async def _create(self, request: _Request, place: Place) -> _Answer:
        if not place.path:
            raise denied("say a file in a checkpoint")
        if not request.has_body_next():
            return _Answer(307, headers=[(b"location", self._with_body(request))])
        may_overwrite = request.flag("overwrite", default="OVERWRITE" in request.text("createflag").upper())
        checkpoint = await self._checkpoint(place, may_make=True)
        with checkpoint.files.create(place.path, may_overwrite=may_overwrite) as file:
            async for piece in request.body():
                file.write(piece)
        await self._checkpoints.wait_at_gate(checkpoint, place.path)
        return _Answer(201)

    def _with_body(self, request: _Request) -> bytes:
        """Returns the address that a file is sent to."""
        host = request.headers.get(b"host")
        if host is None:
            raise illegal("the request has no Host")
        query = request.raw_query + b"&" if request.raw_query else b""
        target = request.raw_path + b"?" + query + f"{_BODY_FOLLOWS}=true".encode()
        return request.scheme.encode() + b"://" + host + target

    async def _open(self, request: _Request, place: Place) -> _Answer:
        offset, length = request.number("offset") or 0, request.number("length")
        checkpoint = await self._checkpoint(place)
        fd, size_bytes = checkpoint.files.open(place.path)
        if offset > size_bytes:
            os.close(fd)
            raise refused(f"/{place}: has {size_bytes:,} bytes, and offset {offset:,} is behind its end")
        rest = size_bytes - offset
        return _Answer(file=(fd, offset, rest if length is None else min(length, rest)))

    async def _home(self, request: _Request, place: Place) -> _Answer:
        return _json({"Path": "/"})

    async def _defaults(self, request: _Request, place: Place) -> _Answer:
        return _json(
            {
                "FsServerDefaults": {
                    "blockSize": BLOCK_BYTES,
                    "bytesPerChecksum": 512,
                    "checksumType": 2,
                    "defaultStoragePolicyId": 0,
                    "encryptDataTransfer": False,
                    "fileBufferSize": 4096,
                    "keyProviderUri": "",
                    "policyId": 0,
                    "replication": 1,
                    "trashInterval": 0,
                    "writePacketSize": 65536,
                }
            }
        )


async def _send(answer: _Answer, send: Send) -> None:
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
