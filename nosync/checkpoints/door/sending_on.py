"""Sending on what is asked here to the door of another host, which serves the checkpoint.

What a task writes stays on its host: the other door is told that it is here, and gets it later. Small files go along, for
that costs no more than telling of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from nosync.checkpoints.door.elsewhere import Reference
from nosync.checkpoints.door.exchange import Answer, Request
from nosync.checkpoints.door.other_doors import OtherDoors
from nosync.checkpoints.door.places import Place
from nosync.checkpoints.door.remote_errors import refused
from nosync.checkpoints.door.spool import Spool
from nosync.checkpoints.door.who_serves import MISDIRECTED, WhoServes
from nosync.lsm.errors import ReplicationError

AT_ONCE = 8
"""So many requests of this host wait for other doors. Spark's others wait for these."""
SMALL_BYTES = 64 << 10
_AGAIN = ("DELETE", "GETFILELINKSTATUS", "GETFILESTATUS", "LISTSTATUS", "MKDIRS", "OPEN")
"""Done again they do the same: so they are asked again where the door that served the checkpoint is gone."""


class SendingOn:
    """Sends requests on. Its methods belong to the event loop. `small_bytes`: larger files stay here for a while."""

    def __init__(self, doors: OtherDoors, who: WhoServes, spool: Spool, small_bytes: int = SMALL_BYTES) -> None:
        self._doors, self._who, self._spool, self._small_bytes = doors, who, spool, small_bytes
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="nosync-other-doors")

    def close(self) -> None:
        """Sends on nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self, node: str, operation: str, request: Request, place: Place, target: Place | None
    ) -> Answer | None:
        """Returns what the door beside `node` answers; None where another door has to be asked.

        `target`: the place of `destination`, where the request has one. Raises ReplicationError where the door does not answer
        and it is not known what it did.
        """
        parameters = {**request.parameters, "op": operation}
        parameters.pop("body", None)
        if target is not None:
            parameters["destination"] = str(target)
        try:
            if operation == "CREATE":
                answer = await self._create(node, request, place, parameters)
            elif operation == "OPEN":
                answer = await self._in_thread(self._open, node, place, parameters)
            else:
                answer = await self._in_thread(self._call, node, request.method, place, parameters)
        except ReplicationError:
            self._who.forget(place.name)
            if operation not in _AGAIN:
                raise
            return None
        if answer.status != MISDIRECTED:
            return answer
        self._who.forget(place.name)
        if operation == "CREATE":
            raise refused(f"the door of node {node} does not serve checkpoint {place.name} any more: try again")
        return None

    async def _in_thread(self, do: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, do, *arguments)

    def _call(self, node: str, method: str, place: Place, parameters: Mapping[str, str], body: bytes = b"") -> Answer:
        status, said = self._doors.call(node, method, str(place), parameters, body)
        return Answer(status, said)

    def _open(self, node: str, place: Place, parameters: Mapping[str, str]) -> Answer:
        """Gets a file, or a part of it, whole before any of it is answered."""
        with self._spool.create() as (part, file):
            status = self._doors.receive(file, node, "GET", str(place), parameters)
            file.flush()
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        if status == 200:
            return Answer(file=(fd, 0, file.size_bytes))
        with open(fd, "rb") as said:
            return Answer(status, said.read())

    async def _create(self, node: str, request: Request, place: Place, parameters: dict[str, str]) -> Answer:
        with self._spool.create() as (part, file):
            async for piece in request.body():
                file.write(piece)
            file.flush()
            if file.size_bytes <= self._small_bytes:
                parameters["body"] = "true"
                return await self._in_thread(self._call, node, "PUT", place, parameters, part.read_bytes())
            reference = self._spool.keep(place.name, part, file, self._doors.me)
        parameters |= {"op": "REFER", **written(reference)}
        answer = None
        try:
            answer = await self._in_thread(self._call, node, "PUT", place, parameters)
            return answer
        finally:
            # Where it is not known what the other door did, it may ask for the file.
            if answer is not None and answer.status >= 300:
                self._spool.release(place.name, reference.token)


def written(reference: Reference) -> dict[str, str]:
    """Returns the parameters that say where a file is."""
    return {
        "node": reference.node, "token": reference.token, "size": str(reference.size_bytes), "digest": reference.digest,
    }  # fmt: skip


def reference_of(request: Request) -> Reference:
    """Returns what the parameters of a request say where a file is. Raises RemoteError."""
    return Reference(request.text("node"), request.text("token"), request.number("size") or 0, request.text("digest"))
