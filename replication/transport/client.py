"""The clients of a daemon: of the one that keeps a directory, of one at an address, of a peer's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc

from nosync.lsm.errors import BusyError, RefusedError, ReplicationError
from nosync.lsm.status import LayerStatus
from nosync.proto.v1 import replication_pb2 as pb
from nosync.proto.v1 import replication_pb2_grpc as rpc
from nosync.replication.transport.addresses import is_of_this_host
from nosync.replication.transport.channel import CALL_TIMEOUT_S, PLACE_KEY, Certificates, channel_to, context_of
from nosync.replication.transport.codec import layer_status_of
from nosync.replication.transport.daemon_files import ADDRESS_FILE, address_of
from nosync.replication.transport.handshake import look
from nosync.replication.transport.sockets import SOCKET_FILE, Meeting, SocketPath, answers

log = logging.getLogger("nosync.replication")

TOLD_PATIENCE_S = 1.0
"""How long a client that closes waits for what it told to arrive."""
NAMES_PER_CALL = 20_000
_GIVE_YOURS = ": if it is a daemon with --tls, give yours: NOSYNC_TLS and NOSYNC_IDENTITY, or tls= and identity="


class Listed(NamedTuple):
    """Holds what a daemon says of a file."""

    written_ns: int
    """When it was written; zero: not known."""
    digest: str
    """Of what is durable there; empty: not known."""


class DaemonClient:
    """Calls to the daemon of a data directory.

    Raises ReplicationError where it does not answer, RefusedError where it says no, BusyError where it says: not now.
    """

    def __init__(
        self,
        address: str,
        certificates: Certificates | None = None,
        node: str | None = None,
        place: str | None = None,
        socket: SocketPath | None = None,
    ) -> None:
        """`place`: the token of the directory whose daemon is meant; another one at the address refuses. `socket`:
        calls go there, and `address` is what messages say; it is closed with the client.
        """
        self.address, self.node = address, node or ""
        self._certificates, self._socket = certificates, socket
        self._asked = [(PLACE_KEY, place)] if place else []
        self._channel = channel_to(address, certificates, node, socket)
        self._stub = rpc.DaemonStub(self._channel)
        self._told: set[grpc.Future[pb.Done]] = set()  # gRPC cancels a call that nobody refers to any more

    def status(self, branch: str = "", *, lag: bool = True, timeout_s: float = CALL_TIMEOUT_S) -> pb.StatusReply:
        """Returns node, safe point, problems and peers; with `lag` also how far these are behind, which takes longer."""
        with self._errors("status"):
            request = pb.StatusRequest(branch=branch, lag=lag)
            reply: pb.StatusReply = self._stub.Status(request, timeout=timeout_s, metadata=self._asked)
        return reply

    def attach(self, patience_s: float) -> pb.AttachReply:
        """A job is to run beside the daemon: waits until everything that peers have is here."""
        with self._errors("attach"):
            reply: pb.AttachReply = self._stub.Attach(
                pb.AttachRequest(patience_s=patience_s), timeout=patience_s + CALL_TIMEOUT_S, metadata=self._asked
            )
        return reply

    def keep(self, traces: list[str]) -> bool:
        """Asks that what peers have of these traces is fetched. Returns whether they have, or may have, what is not
        here.
        """
        with self._errors("keep"):
            request = pb.KeepRequest(traces=traces)
            return bool(self._stub.Keep(request, timeout=CALL_TIMEOUT_S, metadata=self._asked).peers)

    def note(self, layers: list[str]) -> None:
        """Tells of published layers; not waited for, because the daemon finds them anyway."""
        call = self._stub.Note.future(pb.NoteRequest(layers=layers), timeout=CALL_TIMEOUT_S, metadata=self._asked)
        self._told.add(call)
        call.add_done_callback(self._told.discard)

    def sync(self, timeout_s: float = 600.0) -> None:
        with self._errors("sync"):
            self._stub.Sync(pb.SyncRequest(), timeout=timeout_s, metadata=self._asked)

    def check(self, timeout_s: float = 3600.0) -> list[str]:
        with self._errors("check"):
            return list(self._stub.Check(pb.CheckRequest(), timeout=timeout_s, metadata=self._asked).errors)

    def compact(self, stage: str = "", timeout_s: float = 3600.0) -> Iterator[int]:
        with self._errors("compact"):
            for progress in self._stub.Compact(pb.CompactRequest(stage=stage), timeout=timeout_s, metadata=self._asked):
                yield int(progress.merges)

    def fetch_rounds(self, traces: Sequence[str], t: int) -> None:
        """Returns when what other hosts recorded of an epoch's rounds in these traces is here."""
        with self._errors("fetch the rounds of a loop"):
            self._stub.FetchRounds(pb.FetchRoundsRequest(traces=traces, t=t), timeout=60.0, metadata=self._asked)

    def drop_rounds(self, stage: str, t: int, *, everywhere: bool = False, at_once: bool = False) -> None:
        """`everywhere`: on the daemon's peers, too. `at_once`: without a grace period, for the rounds run again."""
        with self._errors("drop the rounds of a loop"):
            self._stub.DropRounds(
                pb.DropRoundsRequest(stage=stage, t=t, everywhere=everywhere, at_once=at_once),
                timeout=CALL_TIMEOUT_S,
                metadata=self._asked,
            )

    def conflicts(self, *, take_theirs: bool = False) -> list[str]:
        """Returns the files of which peers hold other contents. `take_theirs`: those count, and ours were discarded."""
        with self._errors("conflicts"):
            return list(
                self._stub.Conflicts(
                    pb.ConflictsRequest(take_theirs=take_theirs), timeout=60.0, metadata=self._asked
                ).names
            )

    def count_copies(self, names: Sequence[str], timeout_s: float = 60.0) -> list[int]:
        """Returns on how many nodes each of these files of kept checkpoints is durable; 0: it is not durable here."""
        found: list[int] = []
        for first in range(0, len(names), NAMES_PER_CALL):
            with self._errors("count copies"):
                request = pb.CountCopiesRequest(names=names[first : first + NAMES_PER_CALL])
                found += self._stub.CountCopies(request, timeout=timeout_s, metadata=self._asked).copies
        return found

    def fetch_checkpoint(self, checkpoint: str, patience_s: float) -> tuple[bool, int]:
        """Asks that what peers have of a kept checkpoint is fetched, and waits for it.

        Returns whether all that is known came within `patience_s`, and how many files of it are durable here.
        """
        with self._errors("fetch a checkpoint"):
            request = pb.FetchCheckpointRequest(checkpoint=checkpoint, patience_s=patience_s)
            reply = self._stub.FetchCheckpoint(request, timeout=patience_s + CALL_TIMEOUT_S, metadata=self._asked)
        return bool(reply.filled), int(reply.files)

    def call_door(
        self, node: str, method: str, path: str, parameters: Mapping[str, str], body: bytes, patience_s: float
    ) -> Iterator[pb.CallDoorReply]:
        """Asks the door beside a peer's daemon; beside this daemon where `node` is empty. Yields its answer in pieces."""
        request = pb.CallDoorRequest(
            node=node, method=method, path=path, parameters=parameters, body=body, patience_s=patience_s
        )
        with self._errors("call a door"):
            yield from self._stub.CallDoor(request, timeout=patience_s, metadata=self._asked)

    def list_files(self, directory: str, timeout_s: float = 60.0) -> dict[str, Listed]:
        """Returns the names in a directory of the daemon's, and what it says of the file of each."""
        with self._errors("list"):
            replies = self._stub.ListFiles(
                pb.ListFilesRequest(directory=directory), timeout=timeout_s, metadata=self._asked
            )
            found: dict[str, Listed] = {}
            for reply in replies:  # a daemon of an earlier version says less
                times, digests = reply.written_ns or itertools.repeat(0), reply.digests or itertools.repeat("")
                found.update(zip(reply.names, map(Listed, times, digests), strict=False))
            return found

    def fetch_files(self, names: Sequence[str], timeout_s: float = 3600.0) -> Iterator[pb.Frame]:
        """Returns the contents of files, as they go between nodes."""
        with self._errors("fetch"):
            yield from self._stub.FetchFiles(pb.FetchFilesRequest(names=names), timeout=timeout_s, metadata=self._asked)

    def layers(self) -> list[LayerStatus]:
        """Returns the layer files of the daemon's node."""
        with self._errors("list layers"):
            layers = self._stub.Layers(pb.LayersRequest(), timeout=600.0, metadata=self._asked)
            return [layer_status_of(layer) for layer in layers]

    def change_members(self, add: Mapping[str, str], remove: Sequence[str]) -> None:
        with self._errors("change members"):
            self._stub.ChangeMembers(
                pb.ChangeMembersRequest(add=add, remove=remove), timeout=CALL_TIMEOUT_S, metadata=self._asked
            )

    def change_branches(self, change: pb.ChangeBranchesRequest) -> int:
        with self._errors("change branches"):
            return int(self._stub.ChangeBranches(change, timeout=60.0, metadata=self._asked).layers_dropped)

    def close(self) -> None:
        end_s = time.monotonic() + TOLD_PATIENCE_S
        for call in list(self._told):
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                call.result(timeout=max(0.0, end_s - time.monotonic()))
        self._channel.close()
        if self._socket is not None:
            self._socket.close()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except ValueError:  # what gRPC raises for a channel that was closed
            raise ReplicationError(f"the connection to the daemon at {self.address} is closed") from None
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise BusyError(str(details)) from None
            if code is grpc.StatusCode.FAILED_PRECONDITION:
                raise RefusedError(str(details)) from None
            is_silent = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if is_silent and self._socket is None:
                found = look(self.address, context_of(self._certificates), self.node)
                if found is not None:
                    advice = "" if self._certificates is not None or not found.is_refusal else _GIVE_YOURS
                    raise ReplicationError(
                        f"something takes connections at {self.address}, and {found.text} ({what}){advice}"
                    ) from None
            raise ReplicationError(
                f"the daemon at {self.address} does not answer ({what}: {code.name.lower()}): start it again with "
                "nosync daemon; what jobs publish meanwhile is kept"
            ) from None


@dataclass(frozen=True)
class Ways:
    """Says how a daemon reaches its peers: with certificates, or without TLS by sockets, which only daemons of this
    user make.
    """

    certificates: Certificates | None
    meeting: Meeting | None

    def socket_of(self, address: str) -> SocketPath | None:
        """Returns the socket of a peer; None: peers are reached by TLS. Raises ReplicationError where others may have
        put sockets there.
        """
        if self.meeting is None:
            return None
        self.meeting.check()
        return SocketPath(self.meeting.socket_of(int(address.rpartition(":")[2])))

    @contextlib.contextmanager
    def channel(self, address: str, node: str) -> Iterator[grpc.Channel]:
        socket = self.socket_of(address)
        try:
            with channel_to(address, self.certificates, node, socket) as channel:
                yield channel
        finally:
            if socket is not None:
                socket.close()

    def client(self, address: str, node: str) -> DaemonClient:
        return DaemonClient(address, self.certificates, node, socket=self.socket_of(address))


def client_of(root: Path) -> DaemonClient | None:
    """Returns a client of the daemon that owns a directory; None where none is there.

    It goes through the directory's socket. Where this user may not open that, it goes to the address, as one who reads,
    or who shows the node's certificate. An address of another host came with the directory from elsewhere, and is not
    followed.
    """
    found = address_of(root)
    if found is None:
        return None
    socket = root / SOCKET_FILE
    if answers(socket):
        return DaemonClient(found["address"], None, found["node"], found.get("place"), SocketPath(socket))
    if not is_of_this_host(found["address"]):
        log.warning(
            "%s names a daemon at %s, which is no address of this host, so it is not asked: the file came from "
            "elsewhere, and can be removed. If that daemon is meant, nosync.connect its address",
            root / ADDRESS_FILE, found["address"],
        )  # fmt: skip
        return None
    tls = Certificates.of_directory(Path(found["tls"]), found["node"]) if found.get("tls") else None
    return DaemonClient(found["address"], tls, found["node"], found.get("place"))
