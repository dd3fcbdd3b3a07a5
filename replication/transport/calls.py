"""What calls a daemon's servers take: from whom, how many at once, and for how long half of one is waited for.

A call of gRPC holds a thread from its first byte on. So who calls is looked at before anything of the call is read,
one caller has only so many calls, those who merely read have only so many together, and a call whose message does
not come ends. A call counts until its answer was taken, so nobody makes the daemon keep answers that he does not
read.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from nosync.lsm.errors import BusyError, ReplicationError
from nosync.proto.v1 import replication_pb2 as pb

log = logging.getLogger("nosync.replication")

MESSAGE_S = 5.0
"""So long the first message of a call is waited for."""
MOST_OF_READER, MOST_OF_READERS = 16, 48
"""Calls at once of one who only reads, and of all of these."""
MOST_OF_MEMBER, MOST_OF_MEMBERS = 32, 64
LINKS_OF_MEMBER = 4
"""One that is there, one that takes its place, and some whose network went and which have not been noticed."""
TCP_THREADS, SOCKET_THREADS = 256, 64
"""More than readers, members and their links hold together: the owner has a certificate, too."""
MOST_CALLS = 1024
"""More at once at the address are refused before they take a thread."""
_LOOK_EVERY_S = 0.5

READERS, MEMBERS, OWNER = "readers", "members", "owner"
"""Who may ask: anybody who gets through to the daemon (with TLS by a certificate of the authority); the store's
nodes; who has this node's own certificate, or may open its socket.
"""
UNREADABLE = object()
"""Stands for a message that is none. See `reader_of`."""
_BOUNDS = {READERS: (MOST_OF_READER, MOST_OF_READERS), MEMBERS: (MOST_OF_MEMBER, MOST_OF_MEMBERS)}


@dataclass(frozen=True)
class Caller:
    """Who calls. `identity`: by the certificate; None without TLS. `is_local`: it came through a socket of the
    owner's.
    """

    identity: str | None
    is_local: bool = False

    def __str__(self) -> str:
        return (
            f"who has the certificate of {self.identity!r}" if self.identity is not None else "who has no certificate"
        )


class Gate:
    """Counts the calls of one server. `role_of`: what a caller is to this node. `checked`: the certificate that a
    call shows; raises ReplicationError where it is revoked.
    """

    def __init__(
        self,
        role_of: Callable[[Caller], str],
        checked: Callable[[grpc.ServicerContext], bytes | None] = lambda context: None,
    ) -> None:
        self._role_of, self._checked = role_of, checked
        self._lock = threading.Lock()
        self._of_one: Counter[tuple[str, Caller]] = Counter()
        self._of_role: Counter[str] = Counter()
        self._waiting: dict[int, tuple[float, grpc.ServicerContext]] = {}
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._clock = threading.Thread(target=self._end_half_calls, name="nosync-half-calls", daemon=True)
        self._clock.start()

    def stop(self) -> None:
        self._closing.set()
        self._clock.join()

    def certificate_of(self, context: grpc.ServicerContext) -> bytes | None:
        """Returns what the caller shows; None without TLS. Ends the call where it is revoked."""
        try:
            return self._checked(context)
        except ReplicationError as error:
            log.warning("a call was refused: %s", error)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError("abort() raises") from None

    def enter(self, caller: Caller, context: grpc.ServicerContext) -> None:
        """Counts a call until it has ended, or ends it where there are too many. The owner's are not counted."""
        role = self._role_of(caller)
        if role in _BOUNDS:
            most_of_one, most = _BOUNDS[role]
            self._count(("calls", caller), most_of_one, role, most, context)

    def enter_link(self, caller: Caller, context: grpc.ServicerContext) -> None:
        """Does what `enter` does for a stream between nodes, which only members open."""
        if self._role_of(caller) == READERS:
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"{caller} is no member of this store: only its nodes open a link"
            )
        if not caller.is_local:  # of those who is who comes with the Hello
            self._count(("links", caller), LINKS_OF_MEMBER, "links", MOST_OF_MEMBERS, context)

    def _count(
        self, one: tuple[str, Caller], most_of_one: int, role: str, most: int, context: grpc.ServicerContext
    ) -> None:
        with self._lock:
            has_room = self._of_one[one] < most_of_one and self._of_role[role] < most
            if has_room:
                self._of_one[one] += 1
                self._of_role[role] += 1

        def left() -> None:
            with self._lock:
                self._of_role[role] -= 1
                self._of_one[one] -= 1
                if not self._of_one[one]:
                    del self._of_one[one]

        if not has_room:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "this node answers many such calls at the moment; try again"
            )
        if not context.add_callback(left):
            left()  # it has ended already
            context.abort(grpc.StatusCode.CANCELLED, "the call has ended")

    @contextmanager
    def deadline(self, context: grpc.ServicerContext) -> Iterator[None]:
        """The call is ended where what is done in here, which waits for a message, takes longer than MESSAGE_S."""
        number = next(self._numbers)
        self._waiting[number] = (time.monotonic() + MESSAGE_S, context)
        try:
            yield
        finally:
            self._waiting.pop(number, None)

    def _end_half_calls(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            now_s = time.monotonic()
            for number, (end_s, context) in list(self._waiting.items()):
                if end_s <= now_s and self._waiting.pop(number, None) is not None:
                    context.cancel()


class Call:
    """One call of a service, as its methods see it."""

    def __init__(self, context: grpc.ServicerContext, caller: Caller) -> None:
        self.context, self.caller = context, caller

    def metadata(self, key: str) -> str | None:
        """Returns the first value that the caller gave under a key."""
        values = (str(value) for name, value in self.context.invocation_metadata() or () if name == key)
        return next(values, None)

    def fail(self, error: Exception) -> None:
        """Answers with an error that the caller can read."""
        is_busy = isinstance(error, BusyError)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_busy else grpc.StatusCode.FAILED_PRECONDITION
        self.context.abort(code, str(error))


def identity_of(context: grpc.ServicerContext) -> str | None:
    """Returns who calls, by the certificate; None without TLS."""
    names: Any = context.auth_context().get("x509_common_name")
    return bytes(names[0]).decode(errors="replace") if names else None


def calls_of(service: Any, gate: Gate, *, is_local: bool) -> grpc.GenericRpcHandler:
    """Returns the methods of the service Daemon. All are declared as streams of messages, so that they begin before
    any has come.
    """
    methods = pb.DESCRIPTOR.services_by_name["Daemon"].methods
    handlers = {
        method.name: _handler(method, getattr(service, method.name), gate, is_local=is_local) for method in methods
    }
    return grpc.method_handlers_generic_handler("nosync.v1.Daemon", handlers)


def health_of(check: Callable[[Any, Any], Any], gate: Gate) -> grpc.GenericRpcHandler:
    """Returns the check of gRPC's health service."""
    (method,) = [one for one in health_pb2.DESCRIPTOR.services_by_name["Health"].methods if one.name == "Check"]
    handlers = {"Check": _handler(method, check, gate, is_local=False)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)


def _handler(
    method: MethodDescriptor, behaviour: Callable[[Any, Any], Any], gate: Gate, *, is_local: bool
) -> grpc.RpcMethodHandler[Any, Any]:
    def begun(incoming: Iterator[Any], context: grpc.ServicerContext) -> tuple[Any, Call]:
        gate.certificate_of(context)
        caller = Caller(identity_of(context), is_local)
        gate.enter(caller, context)
        with gate.deadline(context):
            request = next(incoming, None)
        if request is None or request is UNREADABLE:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{method.name} without a message that this version knows")
        return request, Call(context, caller)

    def one(incoming: Iterator[Any], context: grpc.ServicerContext) -> Any:
        return behaviour(*begun(incoming, context))

    def many(incoming: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield from behaviour(*begun(incoming, context))

    parse = reader_of(message_factory.GetMessageClass(method.input_type).FromString)
    answer = message_factory.GetMessageClass(method.output_type).SerializeToString
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(many, parse, answer)
    return grpc.stream_unary_rpc_method_handler(one, parse, answer)


def reader_of(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a deserializer for gRPC that returns UNREADABLE for bytes that are no message, and never raises.

    Where one raises, gRPC ends the call by itself. A method that then ends it, too, leaves what gRPC knows of the call
    in memory for good, about 6 KB: a stranger could fill it.
    """

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return UNREADABLE

    return read


def first_of(incoming: Iterator[Any], gate: Gate, context: grpc.ServicerContext) -> Iterator[pb.Frame]:
    """Returns the frames of a stream between nodes. The first one comes soon, before anything is kept for it.

    Reading on raises ReplicationError where a later one is no frame.
    """
    with gate.deadline(context):
        first = next(incoming, None)
    if first is UNREADABLE:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link without a frame that this version knows")
    return iter(()) if first is None else itertools.chain([first], _readable(incoming))


def _readable(incoming: Iterator[Any]) -> Iterator[pb.Frame]:
    for frame in incoming:
        if frame is UNREADABLE:
            raise ReplicationError("what came is no frame that this version knows")
        yield frame
