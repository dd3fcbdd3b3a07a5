"""What goes out on a session: messages, and files in pieces, which are read as they are sent."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import PurePosixPath

from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import opened_regular
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.session import Counters, Session
from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.protocol.messages import FileRequest, NotFound
from nosync.replication.transport.codec import Encoder

log = logging.getLogger("nosync.replication")


class OutgoingFiles:
    """The files of one node, as they are sent."""

    def __init__(self, node: Node, counters: Counters) -> None:
        self._node, self._root, self._counters = node, node.directory.root, counters

    def frames_of(self, session: Session) -> Iterator[pb.Frame]:
        """Yields what goes out on a stream, until it is closed. Files are read as they are sent, so the stream holds
        them back.
        """
        encoder = Encoder()
        while True:
            item = session.take()
            if item is None:
                return
            if isinstance(item, FileRequest):
                yield from self._file_frames(session, item, encoder)
            else:
                yield from encoder.frames(item)

    def _file_frames(self, session: Session, request: FileRequest, encoder: Encoder) -> Iterator[pb.Frame]:
        held = request.held
        if held.name in session.sent and held.name not in session.suspects and not request.offset:
            session.suspects.add(held.name)
            self._suspect(held)  # it was of no use there; or it is lost again, or was not wanted before
        session.sent.append(held.name)
        if self._node.directory.env.stub(self._root / held.name) is not None:
            yield from encoder.frames(NotFound(held.name))  # it is said again when it came out of the bucket
            return
        try:
            with (
                opened_regular(self._root / held.name, os.O_RDONLY) as (fd, found),
                os.fdopen(fd, "rb", closefd=False) as file,
            ):
                size_bytes = found.st_size
                if size_bytes != held.size_bytes:
                    raise OSError(errno.EIO, f"the file has {size_bytes} bytes, and had {held.size_bytes}")
                yield from encoder.chunks(request, file)
        except FileNotFoundError:
            yield from encoder.frames(NotFound(held.name))  # merged since it was asked for
            return
        except OSError as error:
            log.warning("cannot send %s: %s", held.name, error)  # the other side asks again, here or elsewhere
            self._suspect(held)
            yield from encoder.frames(NotFound(held.name))
            return
        self._counters.sent_files += 1
        self._counters.sent_bytes += held.size_bytes - request.offset

    def _suspect(self, held: FileVersion) -> None:
        id = held.name.layer
        if held.name.is_opaque:
            self._node.opaque.suspect(PurePosixPath(held.name))
            return
        self._node.suspect([] if id is None else [id], [PurePosixPath(held.name)] if id is None else [])
