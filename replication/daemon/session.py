"""One stream to another node: what waits to go out on it, and the files that come in on it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import FileRequest, Message, SessionId, bytes_of
from nosync.replication.transport.codec import Decoder

log = logging.getLogger("nosync.replication")

MOST_WAITING = 100_000
"""Messages and files for one peer. One that merely is slow asks for no more than a window of files, and is silent soon.
"""
MOST_WAITING_BYTES = 64 << 20
"""Of messages for one peer that it does not take, beside the one that goes out first: it asks for more than it reads.
"""
_SENT_KEPT = 1024


@dataclass
class IncomingFile:
    """A file that is being received."""

    held: FileVersion
    path: Path
    file: BinaryIO
    received_bytes: int = 0
    stopped_s: float = 0.0
    """When its session ended."""


@dataclass
class Session:
    """One stream to another node. `identity`: who its certificate says it is; None without TLS."""

    id: SessionId
    identity: str | None
    decoder: Decoder = field(default_factory=Decoder)
    is_greeted: bool = False
    """The Hello of the other side came."""
    outbox: deque[Message | FileRequest] = field(default_factory=deque)
    waiting_bytes: int = 0
    """Of what is in it."""
    incoming: dict[FileName, IncomingFile] = field(default_factory=dict)
    sent: deque[FileName] = field(default_factory=lambda: deque(maxlen=_SENT_KEPT))
    """The files that went over last."""
    suspects: set[FileName] = field(default_factory=set)
    """Those that went over again, for which there may be a reason here."""
    files: threading.Lock = field(default_factory=threading.Lock)
    """Is held while a piece of a file is written."""
    closed: threading.Event = field(default_factory=threading.Event)
    more: threading.Condition = field(default_factory=threading.Condition)
    """For the one who sends: with two waiting here, a message would wake either."""

    @property
    def is_open(self) -> bool:
        return not self.closed.is_set()

    def put(self, items: Iterable[Message | FileRequest]) -> None:
        with self.more:
            if not self.is_open:
                return
            for item in items:
                self.outbox.append(item)
                self.waiting_bytes += bytes_of(item)
            is_large = len(self.outbox) > 1 and self.waiting_bytes > MOST_WAITING_BYTES
            if is_large or len(self.outbox) > MOST_WAITING:
                log.warning(
                    "a peer asks for more than it takes: %d messages and files of %d bytes wait for it",
                    len(self.outbox), self.waiting_bytes,
                )  # fmt: skip
                self.outbox.clear()
                self.waiting_bytes = 0
                self.closed.set()
            self.more.notify()

    def take(self) -> Message | FileRequest | None:
        """Returns what goes out next, once there is something. None: the session was closed."""
        with self.more:
            self.more.wait_for(lambda: self.outbox or not self.is_open)
            if not self.outbox:
                return None
            item = self.outbox.popleft()
            self.waiting_bytes -= bytes_of(item)
            return item

    def close(self) -> None:
        with self.more:
            self.closed.set()
            self.more.notify()


@dataclass
class Counters:
    """Counts what went over the wire since the start."""

    sent_bytes: int = 0
    sent_files: int = 0
    received_bytes: int = 0
    received_files: int = 0
    refused_files: int = 0
    """Received, and not what was announced."""
