"""Which door serves a checkpoint: the one that the query's driver came to, be it here or on another host.

One door serves a checkpoint: it has the names of all files. The doors of the other hosts send on to it what executors
ask there, and also a driver, as long as it answers. Where it does not, the door that a driver comes to takes over, and
goes on from what is kept. An executor never makes a door take over: it touches nothing but states.

Invariants
- A door that serves a checkpoint asks, before it takes offsets, whether another one does, say after the network was cut.
  The one that does not count takes no more.
- A door that serves an earlier generation than the one that counts here was cut off, and is not believed.
- A directory of a door that does not serve the checkpoint is put aside: nothing is gone on from there later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from nosync.checkpoints.door.other_doors import OtherDoors, Server
from nosync.checkpoints.door.places import Place
from nosync.checkpoints.door.remote_errors import RemoteError, refused
from nosync.checkpoints.generations import generations_of
from nosync.checkpoints.keep import open_generation
from nosync.checkpoints.names import METADATA
from nosync.checkpoints.peers import ask_peers
from nosync.checkpoints.rewind import put_aside
from nosync.lsm.errors import NosyncError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import CHECKPOINT_LIVE

log = logging.getLogger("nosync")

STATES = "state/"
FETCH_PATIENCE_S = 20.0
"""How long the first request for a checkpoint waits for what only peers have. Spark waits for 60 seconds."""
COMES_BACK_S = 10.0
"""How long an executor waits for the door that serves its checkpoint, which may be opened again; and a driver for one that
may serve it, and does not answer.
"""
ASK_AGAIN_S = 1.0
MISDIRECTED = 421
"""The HTTP status of what was sent to a door that does not serve the checkpoint."""


class WhoServes:
    """Finds who serves checkpoints, for the door of one data directory. Its methods belong to one event loop.

    `serves_here`: returns the generation of a checkpoint that this door serves; None where it does not.
    """

    def __init__(self, data: Path, env: Env, doors: OtherDoors, serves_here: Callable[[str], int | None]) -> None:
        self._data, self._env, self._doors, self._serves_here = data, env, doors, serves_here
        self._nodes: dict[str, str] = {}
        self._looking: dict[str, asyncio.Lock] = {}
        self._asked_s: dict[str, float] = {}

    async def node_of(self, place: Place, *, is_sent_on: bool) -> str | None:
        """Returns the node whose door serves a checkpoint; None where this one does, or is to.

        `is_sent_on`: another door sent the request here. Raises RemoteError where this door is not to serve what it asks,
        ReplicationError where the daemon of this host does not know.
        """
        if self._serves_here(place.name) is not None:
            return None
        if is_sent_on:
            raise refused(f"the door of this host does not serve checkpoint {place.name}", MISDIRECTED)
        end_s = self._env.monotonic_s() + COMES_BACK_S
        while place.name not in self._nodes:
            async with self._looking.setdefault(place.name, asyncio.Lock()):
                if self._serves_here(place.name) is not None:
                    return None
                if place.name in self._nodes:
                    break
                is_late = self._env.monotonic_s() >= end_s
                found, is_final = await asyncio.to_thread(self._find, place, is_late=is_late)
                if found is not None:
                    log.info("checkpoint %s is served by the door of %s", place.name, found.node)
                    self._nodes[place.name] = found.node
                elif is_final:
                    return None
                elif is_late:
                    raise refused(
                        f"no door serves checkpoint {place.name} at the moment: it is opened when the query's driver asks for it"
                    )
            if found is None:
                await asyncio.sleep(ASK_AGAIN_S)
        return self._nodes[place.name]

    def forget(self, name: str) -> None:
        """The door that served a checkpoint does not answer, or does not serve it any more."""
        self._nodes.pop(name, None)

    def _find(self, place: Place, *, is_late: bool) -> tuple[Server | None, bool]:
        """Returns who serves a checkpoint; None and True where this door is to, None and False where nobody does yet, or it
        is not known. `is_late`: who did not say by now whether it serves the checkpoint is not waited for.
        """
        live = self._data / CHECKPOINT_LIVE / place.name
        is_here, is_state = self._env.exists(live / METADATA), place.path.startswith(STATES)
        try:
            found, all_said = self._servers(place.name)
        except NosyncError:
            if is_here:  # it goes on without its daemon
                return None, True
            raise
        if not found and not is_here and not is_state:
            # Peers may not be met yet. When this returns they are, or are not there.
            ask_peers(self._data, place.name, FETCH_PATIENCE_S)
            found, all_said = self._servers(place.name)
        if found:
            put_aside(live, self._env)
            return found[0], True
        if not all_said and not is_late:
            return None, False
        return None, is_here or not is_state or not self._doors.peers()

    def _servers(self, name: str) -> tuple[list[Server], bool]:
        """Returns the doors that serve a checkpoint and were not cut off, the one that counts first, and whether all that
        may serve it said so.
        """
        found, all_said = self._doors.servers(name)
        if found:
            newest = open_generation(self._data, name, self._env).generation
            found = [one for one in found if one.generation >= newest]
        return found, all_said

    async def check_alone(self, name: str) -> None:
        """Raises RivalError where another door counts as the one that serves a checkpoint, which this one serves, too.

        It counts even when it is closed, once the generation is here that its query went on into.
        """
        mine = self._serves_here(name)
        now_s = self._env.monotonic_s()
        if mine is None or now_s - self._asked_s.get(name, float("-inf")) < ASK_AGAIN_S:
            return
        rival = await asyncio.to_thread(self._rival, name, mine)
        self._asked_s[name] = self._env.monotonic_s()
        if rival is not None:
            del self._asked_s[name]
            raise RivalError(name, rival)

    def _rival(self, name: str, generation: int) -> Server | None:
        try:
            if max(generations_of(self._data, name, self._env), default=0) > generation:
                newest = open_generation(self._data, name, self._env).generation
                if newest > generation:
                    return Server(newest, "")
            found, _ = self._doors.servers(name)
            if not found or not found[0].comes_before(Server(generation, self._doors.me)):
                return None
        except NosyncError as error:  # a query does not end because its daemon is away
            log.debug("checkpoint %s: nobody says whether another door serves it: %s", name, error)
            return None
        return found[0]


class RivalError(RemoteError):
    """Another door serves the checkpoint, and counts."""

    def __init__(self, name: str, rival: Server) -> None:
        where = (
            f"is served by the door of node {rival.node} by now, where its query goes on"
            if rival.node
            else f"has gone on elsewhere, into generation {rival.generation}"
        )
        super().__init__(403, "java.io.IOException", f"checkpoint {name} {where}: end this query, or start it again")
