"""The door as an ASGI application: WebHDFS, as far as a checkpoint needs it.

No answer has a `Content-Type`: the Hadoop client that pyspark ships would parse it with a class that pyspark does not
ship. A file is sent to another address than the one that is asked first, as the protocol has it; here that is the same
address with one more parameter. What is asked without a path, and so without the secret, gets the same constants
whoever asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from nosync.checkpoints.door.elsewhere import SpreadFiles
from nosync.checkpoints.door.exchange import (
    BODY_FOLLOWS,
    Answer,
    GoneError,
    Limits,
    Receive,
    Request,
    Scope,
    Send,
    json_answer,
    send_answer,
)
from nosync.checkpoints.door.file_operations import BLOCK_BYTES, directory_status
from nosync.checkpoints.door.places import PREFIX, Place, place_of_path, place_of_target
from nosync.checkpoints.door.remote_errors import RemoteError, denied, illegal, not_found, refused, unsupported
from nosync.checkpoints.door.sending_on import reference_of
from nosync.checkpoints.door.served_checkpoints import ServedCheckpoint, ServedCheckpoints
from nosync.lsm.errors import NosyncError

log = logging.getLogger("nosync")

THROUGH = "through"
"""The parameter of a request that another door sent on: it says beside which node that is."""
_OF_DOORS = ("REFER", "RELEASE", "SERVES", "SPOOLED")
"""Operations that WebHDFS has not: a door asks another one."""
_TRIES = 3


class DoorApp:
    """Answers requests. It is an ASGI application of HTTP alone."""

    def __init__(self, checkpoints: ServedCheckpoints, secret: str, limits: Limits | None = None) -> None:
        self._checkpoints, self._secret, self._limits = checkpoints, secret, limits or Limits()
        self._operations: dict[str, tuple[str, Callable[[Request, Place], Awaitable[Answer]]]] = {
            "CREATE": ("PUT", self._create),
            "DELETE": ("DELETE", self._delete),
            "GETFILELINKSTATUS": ("GET", self._status),
            "GETFILESTATUS": ("GET", self._status),
            "GETHOMEDIRECTORY": ("GET", self._home),
            "GETSERVERDEFAULTS": ("GET", self._defaults),
            "LISTSTATUS": ("GET", self._list),
            "MKDIRS": ("PUT", self._make_dirs),
            "OPEN": ("GET", self._open),
            "REFER": ("PUT", self._refer),
            "RELEASE": ("DELETE", self._release),
            "RENAME": ("PUT", self._rename),
            "SERVES": ("GET", self._serves),
            "SPOOLED": ("GET", self._spooled),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever it is."""
        try:
            answer = await self._answer(scope, receive)
        except GoneError:
            return
        await send_answer(answer, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        try:
            if scope["type"] != "http":
                raise refused("the door speaks HTTP alone")
            return await self._operate(scope, receive)
        except RemoteError as error:
            headers = [(b"connection", b"close")] if error.ends_connection else []
            return Answer(error.status, error.body(), headers)
        except NosyncError as error:
            return Answer(403, refused(str(error)).body())
        except GoneError:
            raise
        except asyncio.CancelledError:  # the rest of a body did not come while the door ended
            return Answer(503, refused("the door ends; ask again").body(), [(b"connection", b"close")])
        except Exception:  # a defect of ours: the query is told, and the door lives
            log.exception("the door could not answer a request (%s)", scope.get("method"))  # the rest has the secret
            return Answer(500, refused("the door could not answer; its log says why").body())

    async def _operate(self, scope: Scope, receive: Receive) -> Answer:
        raw_path: bytes = scope["raw_path"]
        if raw_path.rstrip(b"/") == PREFIX:  # the client asks so for what belongs to no path
            request = Request(scope, receive, self._limits)
            if request.method == "GET" and request.text("op").upper() in ("GETHOMEDIRECTORY", "GETSERVERDEFAULTS"):
                answer = await self._operations[request.text("op").upper()][1](request, Place("", ""))
                answer.headers.append((b"connection", b"close"))  # who did not say the secret keeps none
                return answer
        place = place_of_target(raw_path, self._secret)
        request = Request(scope, receive, self._limits)
        name = request.text("op").upper()
        if not name:
            raise illegal("say an operation: op=...")
        if name not in self._operations or (name in _OF_DOORS and not request.text(THROUGH)):
            raise unsupported(
                f"{name[:64]} is not done here: the door is for checkpoints of Structured Streaming queries"
            )
        method, operate = self._operations[name]
        if request.method != method:
            raise RemoteError(405, "java.lang.IllegalArgumentException", f"{name} is a {method} request")
        return await self._sent_on(name, request, place) or await operate(request, place)

    async def _sent_on(self, name: str, request: Request, place: Place) -> Answer | None:
        """Returns the answer of another door, if that one serves the checkpoint; None where this one answers."""
        who, sending = self._checkpoints.who, self._checkpoints.sending
        is_first_of_two = name == "CREATE" and not request.has_body_next()  # of these this door answers the first
        if who is None or sending is None or not place.name or name in _OF_DOORS[1:] or is_first_of_two:
            return None
        target = self._target(request) if name == "RENAME" else None
        for _ in range(_TRIES):
            node = await who.node_of(place, is_sent_on=bool(request.text(THROUGH)))
            if node is None:
                return None
            answer = await sending.answer(node, name, request, place, target)
            if answer is not None:
                return answer
        raise refused(f"no door that serves checkpoint {place.name} answers at the moment: try again")

    async def _checkpoint(self, place: Place, *, may_make: bool = False) -> ServedCheckpoint:
        if not place.name:
            raise denied("say a checkpoint: the directory of all checkpoints is nobody's")
        return await self._checkpoints.of(place, may_make=may_make)

    async def _status(self, request: Request, place: Place) -> Answer:
        if not place.name:
            return json_answer({"FileStatus": directory_status()})
        return json_answer({"FileStatus": (await self._checkpoint(place)).files.status(place.path)})

    async def _list(self, request: Request, place: Place) -> Answer:
        if place.name:
            found = (await self._checkpoint(place)).files.list(place.path)
        else:
            found = [directory_status(name) for name in self._checkpoints.names()]
        return json_answer({"FileStatuses": {"FileStatus": found}})

    async def _make_dirs(self, request: Request, place: Place) -> Answer:
        if place.name:
            (await self._checkpoint(place, may_make=True)).files.make_dirs(place.path)
        return json_answer({"boolean": True})

    async def _delete(self, request: Request, place: Place) -> Answer:
        is_recursive = request.flag("recursive", default=False)
        try:
            checkpoint = await self._checkpoint(place)
        except RemoteError as error:
            if error.status != 404:
                raise
            return json_answer({"boolean": False})
        if place.path:
            done = await asyncio.to_thread(checkpoint.files.delete, place.path, is_recursive=is_recursive)
            return json_answer({"boolean": done})
        if not is_recursive:
            raise denied(f"{place.name} is a checkpoint: it is removed with all that is in it, or not at all")
        await self._checkpoints.forget(place)
        return json_answer({"boolean": True})

    async def _rename(self, request: Request, place: Place) -> Answer:
        target = self._target(request)
        if not place.path or not target.path or place.name != target.name:
            raise denied("a file is renamed within its checkpoint")
        options = request.text("renameoptions").upper()
        if options not in ("", "NONE", "OVERWRITE"):
            raise illegal(f"renameoptions is {options[:32]!r}: expected NONE or OVERWRITE")
        checkpoint = await self._checkpoint(place)
        await self._checkpoints.check_alone(place.name, target.path)
        checkpoint.check_follows(target.path)
        try:
            checkpoint.files.rename(place.path, target.path, may_overwrite=options == "OVERWRITE")
        except RemoteError as error:
            if options or error.status == 500:
                raise
            return json_answer({"boolean": False})  # the older form says no more
        await self._checkpoints.wait_at_gate(checkpoint, target.path)
        return Answer() if options else json_answer({"boolean": True})

    def _target(self, request: Request) -> Place:
        said = request.text("destination")
        if not said:
            raise illegal("say what the file is to be called: destination=...")
        return place_of_path(said, self._secret)

    async def _create(self, request: Request, place: Place) -> Answer:
        if not place.path:
            raise denied("say a file in a checkpoint")
        if not request.has_body_next():
            return Answer(307, headers=[(b"location", self._with_body(request))])
        checkpoint = await self._checkpoint(place, may_make=True)
        await self._checkpoints.check_alone(place.name, place.path)
        checkpoint.check_follows(place.path)
        with checkpoint.files.create(place.path, may_overwrite=_may_overwrite(request)) as file:
            async for piece in request.body():
                file.write(piece)
        await self._checkpoints.wait_at_gate(checkpoint, place.path)
        return Answer(201)

    def _with_body(self, request: Request) -> bytes:
        """Returns the address that a file is sent to."""
        host = request.headers.get(b"host")
        if host is None:
            raise illegal("the request has no Host")
        query = request.raw_query + b"&" if request.raw_query else b""
        target = request.raw_path + b"?" + query + f"{BODY_FOLLOWS}=true".encode()
        return request.scheme.encode() + b"://" + host + target

    async def _open(self, request: Request, place: Place) -> Answer:
        offset, length = request.number("offset") or 0, request.number("length")
        checkpoint = await self._checkpoint(place)
        if isinstance(checkpoint.files, SpreadFiles) and checkpoint.files.is_elsewhere(place.path):
            await asyncio.to_thread(checkpoint.files.bring, place.path)
        fd, size_bytes = checkpoint.files.open(place.path)
        if offset > size_bytes:
            os.close(fd)
            raise refused(f"/{place}: has {size_bytes:,} bytes, and offset {offset:,} is behind its end")
        rest = size_bytes - offset
        return Answer(file=(fd, offset, rest if length is None else min(length, rest)))

    async def _refer(self, request: Request, place: Place) -> Answer:
        """Gives a name to a file that is beside another door."""
        if not place.path:
            raise denied("say a file in a checkpoint")
        checkpoint = await self._checkpoint(place, may_make=True)
        if not isinstance(checkpoint.files, SpreadFiles):
            raise unsupported("this door knows no other doors: a file is written here, and not beside one of them")
        await self._checkpoints.check_alone(place.name, place.path)
        checkpoint.check_follows(place.path)
        checkpoint.files.refer(place.path, reference_of(request), may_overwrite=_may_overwrite(request))
        await self._checkpoints.wait_at_gate(checkpoint, place.path)
        return Answer(201)

    async def _release(self, request: Request, place: Place) -> Answer:
        """Removes a file that the door which serves the checkpoint has by now."""
        self._checkpoints.spool.release(place.name, place.path)
        return Answer()

    async def _serves(self, request: Request, place: Place) -> Answer:
        """Says whether this door serves a checkpoint."""
        generation = self._checkpoints.generation_of(place.name)
        if generation is None:
            raise not_found(str(place))
        return json_answer({"generation": generation})

    async def _spooled(self, request: Request, place: Place) -> Answer:
        """Sends a file that a task of this host wrote."""
        try:
            fd, size_bytes = self._checkpoints.spool.open(place.name, place.path)
        except FileNotFoundError:
            raise not_found(str(place)) from None
        return Answer(file=(fd, 0, size_bytes))

    async def _home(self, request: Request, place: Place) -> Answer:
        return json_answer({"Path": "/"})

    async def _defaults(self, request: Request, place: Place) -> Answer:
        return json_answer(
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


def _may_overwrite(request: Request) -> bool:
    """Returns whether a file may get a name that another one has: as both forms of asking say it."""
    return request.flag("overwrite", default="OVERWRITE" in request.text("createflag").upper())
