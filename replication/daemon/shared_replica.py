"""The protocol of one node as several threads use it: one at a time, and its effects go to the sessions' outboxes."""

from __future__ import annotations

import logging
import threading

from nosync.lsm.platform.env import Env
from nosync.replication.daemon.session import Session
from nosync.replication.protocol.messages import Close, Effect, Send, SessionId
from nosync.replication.protocol.replica import Replica

log = logging.getLogger("nosync.replication")

LOG_AGAIN_S = 60.0
"""After which a reason to refuse a peer is logged again."""


class SharedReplica:
    """A replica with its lock, and the sessions. Whoever calls the replica holds the lock, and hands its effects to
    `act`.
    """

    def __init__(self, replica: Replica, env: Env) -> None:
        self.replica, self._env = replica, env
        self.lock = threading.RLock()
        self._sessions: dict[SessionId, Session] = {}
        self._logged_s: dict[str, float] = {}  # reasons, and when they were logged
        self._next_session = 0
        self._is_stopped = False

    def open_session(self, identity: str | None) -> Session:
        """A stream to another node begins."""
        with self.lock:
            session = Session(SessionId(self._next_session), identity)
            self._next_session += 1
            if self._is_stopped:
                session.close()
                return session
            self._sessions[session.id] = session
            self.act(self.replica.connected(session.id))
        return session

    def close_session(self, session: Session) -> None:
        """A stream has ended. Closing twice is fine."""
        session.close()
        with self.lock:
            if self._sessions.pop(session.id, None) is not None:
                self.act(self.replica.disconnected(session.id))

    def stop(self) -> None:
        """Closes all sessions, and those that still come."""
        with self.lock:
            self._is_stopped = True
            for session in self._sessions.values():
                session.close()

    def advance(self) -> None:
        """Tells the replica the time, with the lock held: who fell silent since the last tick is sent nothing
        unasked.
        """
        state = self.replica.state
        state.advance(max(state.now_s, self._env.monotonic_s()))

    def tick(self) -> None:
        """Lets the replica do what is due."""
        with self.lock:
            self.act(self.replica.tick(self._env.monotonic_s()))

    def act(self, effects: list[Effect]) -> None:
        """Puts effects into outboxes, with the lock held, and does nothing else."""
        for effect in effects:
            session = self._sessions.get(effect.session)
            if session is None:
                continue
            if isinstance(effect, Send):
                session.put([effect.message])
            elif isinstance(effect, Close):
                self._log_again(effect.reason)
                session.close()
            else:
                session.put(effect.files)

    def _log_again(self, reason: str) -> None:
        """Logs a reason now and then: who is refused dials again and again."""
        now_s = self._env.monotonic_s()
        if now_s - self._logged_s.get(reason, -LOG_AGAIN_S) >= LOG_AGAIN_S:
            log.warning("%s", reason)
            recent = {one: at for one, at in self._logged_s.items() if now_s - at < LOG_AGAIN_S}
            self._logged_s = recent | {reason: now_s}
