"""The streams between nodes: the service that peers call, and the links that are open."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import grpc

from nosync.lsm.errors import NosyncError, ReplicationError
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.session import Session
from nosync.replication.transport.calls import Caller, Gate, first_of, identity_of, reader_of
from nosync.replication.transport.revocation import Revocations

log = logging.getLogger("nosync.replication")
# Bytes that are no frame end the stream; gRPC would log a stack trace for each.
logging.getLogger("grpc._common").setLevel(logging.CRITICAL)


class OpenLinks:
    """The open links, so that those whose certificate is revoked can be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Session, bytes | None]] = {}

    @contextlib.contextmanager
    def __call__(self, session: Session, shown: bytes | None) -> Iterator[None]:
        """A link is open. `shown`: the certificate of the other side; None: this one dialled, and looks when it dials
        again.
        """
        with self._lock:
            self._open[session.id] = session, shown
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(session.id, None)

    def end_revoked(self, revocations: Revocations) -> None:
        """Ends links of the revoked, and all that this side dialled: they come about again unless the other side is."""
        with self._lock:
            found = list(self._open.values())
        for session, shown in found:
            try:
                if shown is not None:
                    revocations.check(shown, "a linked node")
                    continue
            except ReplicationError as error:
                log.warning("stream ended: %s", error)
            session.close()


class LinkService:
    """The service of streams between nodes, of one server."""

    def __init__(self, replicator: Replicator, gate: Gate, linked: OpenLinks, *, is_local: bool) -> None:
        self._replicator, self._gate, self._linked, self._is_local = replicator, gate, linked, is_local

    def handlers(self) -> grpc.GenericRpcHandler:
        link = grpc.stream_stream_rpc_method_handler(
            self.link, reader_of(pb.Frame.FromString), pb.Frame.SerializeToString
        )
        return grpc.method_handlers_generic_handler("nosync.v1.Replication", {"Link": link})

    def link(self, incoming: Iterator[pb.Frame], context: grpc.ServicerContext) -> Iterator[pb.Frame]:
        shown = self._gate.certificate_of(context)
        caller = Caller(identity_of(context), self._is_local)
        self._gate.enter_link(caller, context)
        incoming = first_of(incoming, self._gate, context)
        session = self._replicator.open_session(caller.identity)
        if not context.add_callback(session.close):
            session.close()  # it has ended already
        reader = threading.Thread(target=self._read, args=(session, incoming), daemon=True)
        reader.start()
        try:
            with self._linked(session, shown):
                yield from self._replicator.frames_of(session)
        finally:
            self._replicator.close_session(session)

    def _read(self, session: Session, incoming: Iterator[pb.Frame]) -> None:
        read_all(self._replicator, session, incoming)
        session.close()


def read_all(replicator: Replicator, session: Session, incoming: Iterator[pb.Frame]) -> None:
    """Hands on what comes until the stream ends. What no node would send ends it."""
    try:
        for frame in incoming:
            replicator.received(session, frame)
    except grpc.RpcError:
        pass  # the stream broke; whoever dialled dials again
    except ReplicationError as error:
        log.warning("stream ended: %s", error)
    except NosyncError as error:
        log.error("stream ended: %s", error)
    except Exception:
        if session.is_open:
            log.error("stream ended", exc_info=True)


def cancel_when_closed(session: Session, call: grpc.Call) -> None:
    """Waits for the end of a session, and ends the call that carries it."""
    session.closed.wait()
    call.cancel()
