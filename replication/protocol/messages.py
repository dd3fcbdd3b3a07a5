"""What nodes say to each other, and what the protocol asks its driver to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.placement import NodeId

SessionId = NewType("SessionId", int)

PROTOCOL_VERSION = 3
PUSH_FILE_BYTES = 64 << 10
"""No larger file goes unasked."""


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """Begins a session on either side."""

    node: NodeId
    incarnation: str
    store_id: str
    replicas: int
    version: int = PROTOCOL_VERSION
    key_groups: int = 0
    """0: it does not say, as nodes of earlier versions."""
    process: str = ""
    """One run of its daemon. Empty: it does not say, as nodes of earlier versions."""


@dataclass(frozen=True)
class Summary:
    """Says all that the sender durably holds, by group: whoever holds what hashes to the same knows what that is."""

    seq: int
    groups: tuple[tuple[str, str], ...]
    """Name and root of each group of files (see Inventory)."""


@dataclass(frozen=True)
class Have:
    """Says all that the sender durably holds of some groups."""

    seq: int
    groups: tuple[str, ...]
    held: tuple[FileVersion, ...]


@dataclass(frozen=True)
class Change:
    """Says what the sender durably holds since the statement before, and what it holds no more."""

    seq: int
    added: tuple[FileVersion, ...] = ()
    gone: tuple[FileName, ...] = ()


@dataclass(frozen=True)
class Heartbeat:
    """Says that the sender is alive; `root` is the hash of its inventory after statement `seq`."""

    seq: int
    root: str
    safe: tuple[tuple[str, int], ...] = ()
    """By timeline, the sender's safe point: once true, it may be relied upon by all."""


@dataclass(frozen=True)
class InventoryRequest:
    """Asks the receiver for what it holds of these groups; of none: for a summary of all."""

    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileRequest:
    """Asks for a file, from a byte on: what is before that came already, in a session that ended."""

    held: FileVersion
    offset: int = 0


@dataclass(frozen=True)
class Want:
    """Asks for these files, in this order."""

    files: tuple[FileRequest, ...]


@dataclass(frozen=True)
class NotFound:
    """Says that a file that was wanted is not held any more."""

    name: FileName


Message = Hello | Summary | Have | Change | Heartbeat | InventoryRequest | Want | NotFound


def bytes_of(message: Message | FileRequest) -> int:
    """Returns about how much memory a message takes that waits to be sent. It has only references to files that are
    held anyway.
    """
    if isinstance(message, Have):
        return 200 + 8 * (len(message.held) + len(message.groups))
    if isinstance(message, Summary):
        return 200 + 100 * len(message.groups)
    if isinstance(message, Change):
        return 200 + 16 * (len(message.added) + len(message.gone))
    return 200


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Asks the driver to send a message to a session."""

    session: SessionId
    message: Message


@dataclass(frozen=True)
class SendFiles:
    """Asks the driver to send files to a session, in order, as they are on disk."""

    session: SessionId
    files: tuple[FileRequest, ...]


@dataclass(frozen=True)
class Close:
    """Asks the driver to end a session, for a reason that an operator should read."""

    session: SessionId
    reason: str


Effect = Send | SendFiles | Close
