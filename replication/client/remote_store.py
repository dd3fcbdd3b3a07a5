"""A store that is read from elsewhere: what is asked for is fetched from a daemon, verified, and kept in a directory
here.

Names are listed by the daemon every time; files never change, so each is fetched once, unless the daemon gave one up
for another of the same name. Reading then is what it is beside the files: merged-away layers are noticed and replaced
by those that stand for them, damaged ones are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import pyarrow as pa
from blake3 import blake3

from nosync.lsm.errors import (
    CorruptionError,
    LostEpochError,
    NosyncError,
    ReplicationError,
    StorageError,
    described,
)
from nosync.lsm.layers.format import decode
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.lost_ends import LOST_END
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import SUFFIX
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.platform.layout import BRANCHES, LAYERS, MARKER
from nosync.lsm.platform.store_marker import create_store, read_marker
from nosync.lsm.settings import StoreSettings
from nosync.lsm.status import LayerStatus, StoreStatus
from nosync.lsm.store.store import Store
from nosync.lsm.store.timelines_view import EndChecks
from nosync.lsm.store.verify import VerifyReport
from nosync.lsm.trace.directory import LayerDirectory
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.remote.stubs import env_of
from nosync.replication.transport.client import DaemonClient, Listed, client_of
from nosync.replication.transport.codec import is_name
from nosync.replication.transport.daemon_files import address_of
from nosync.replication.transport.download import fetch_files
from nosync.replication.transport.sockets import SOCKET_FILE, answers

log = logging.getLogger("nosync.replication")

_UNKNOWN = Listed(0, "")


class RemoteEnv(Env):
    """The files of a daemon's directory as if they were in `root`, where those that were read are kept."""

    def __init__(self, root: Path, client: DaemonClient) -> None:
        self._root, self._client = root, client
        self._local = Env()
        self._listed: dict[Path, Listed] = {}
        self._sound: dict[Path, Listed] = {}  # files that are what the daemon has, and what it said of them by then

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def list_dir(self, path: Path) -> list[str]:
        directory = self._relative(path)
        listed = self._client.list_files(directory)
        self._listed |= {path / name: about for name, about in listed.items()}
        names = list(listed)
        if not directory.startswith(LAYERS):
            small = [name for name in names if name.endswith(".json") and is_name(f"{directory}/{name}")]
            self._fetch([f"{directory}/{name}" for name in small if not self._is_kept(path / name)])
            return [name for name in names if name in small or not name.endswith(".json")]
        return names

    def read(self, path: Path) -> bytes:
        self._have(path)
        return super().read(path)

    def map(self, path: Path) -> pa.Buffer:
        self._have(path)
        return super().map(path)

    def identity(self, path: Path) -> Identity:
        self._have(path)
        return super().identity(path)

    def size_bytes(self, path: Path) -> int:
        self._have(path)
        return super().size_bytes(path)

    def _have(self, path: Path) -> None:
        if not self._is_kept(path):
            self._fetch([self._relative(path)])

    def _is_kept(self, path: Path) -> bool:
        """Returns whether a file is here, and the one that the daemon has, which the digest says: a crash of this
        machine, or another program, may have left anything under its name.
        """
        if not self._local.exists(path):
            return False
        about, known = self._listed.get(path, _UNKNOWN), self._sound.get(path)
        if known is not None and about in (known, _UNKNOWN):
            return True
        if about.digest and about.digest == self._digest_of(path):
            self._sound[path] = about
            return True
        log.info("fetched again: %s is not known to be what %s has", path, self._client.address)
        self._sound.pop(path, None)
        self._local.unlink(path)
        return False

    def _digest_of(self, path: Path) -> str:
        """Returns the digest of a file; empty where it is no file of a store."""
        try:
            if path.suffix == SUFFIX:
                return decode(self._local.map(path), str(path)).digest
            return blake3(self._local.read(path)).hexdigest()
        except (NosyncError, OSError) as error:
            log.warning("fetched again: %s", described(error))
            return ""

    def _fetch(self, names: list[str]) -> None:
        """Files that are not there any more are left out: whoever opens them notices."""
        fetch_files(self._client, self._root, names, self._local)
        for path in (self._root / name for name in names):
            if self._local.exists(path):
                self._sound[path] = self._listed.get(path, _UNKNOWN)

    def create(self, path: Path) -> BinaryIO:
        raise _not_written(self._client.address)

    def unlink(self, path: Path) -> None:
        raise _not_written(self._client.address)


def _not_written(address: str) -> StorageError:
    return StorageError(
        f"the store at {address} is connected to, so it can be read and not written: on the daemon's host "
        "nosync.open() of its directory does both"
    )


class _DaemonsEnds(EndChecks):
    """The daemon knows what of the logs is lost, and what is on its way from a peer."""

    def __init__(self, directory: LayerDirectory, client: DaemonClient) -> None:
        super().__init__(directory)
        self._client = client

    def check_log(self, timelines: Timelines) -> None:
        problem = self._client.status(lag=False).problems.get(BRANCHES)
        if problem is not None:
            raise CorruptionError(problem)

    def check_newest(self, timelines: Timelines, branch: str) -> None:
        problem = self._client.status(lag=False).problems.get(LOST_END + branch)
        if problem is not None:
            raise LostEpochError(problem)


class RemoteStore(Store):
    """A store over a connection: everything that reads works as it does beside the files. Made by `nosync.connect`."""

    def __init__(
        self, directory: LayerDirectory, client: DaemonClient, temporary: TemporaryDirectory[str] | None
    ) -> None:
        """`temporary`: where what was fetched is kept, if only until it is closed."""
        super().__init__(directory, StoreSettings(), None, _DaemonsEnds(directory, client))
        self.client, self._temporary = client, temporary

    @property
    def node(self) -> StoreBackend:
        """Raises StorageError: the node is elsewhere."""
        raise _not_written(self.client.address)

    @property
    def source_path(self) -> str:
        """Returns the address of the daemon."""
        return self.client.address

    def safe_point(self, branch: str = MAIN) -> int | None:
        """Returns what the daemon says: up to there all is on as many nodes as asked for."""
        reply = self.client.status(branch, lag=False)
        return reply.safe_point if reply.HasField("safe_point") else None

    def _safe_point_now(self) -> int | None:
        return self.safe_point()

    def since(self) -> int:
        return int(self.client.status(lag=False).since)

    def sync(self) -> None:
        """Returns when everything that was published on the daemon's node is durable there."""
        self.client.sync()

    def compact(self, stage: str | None = None, progress: Callable[[int], None] | None = None) -> int:
        """Merges on the daemon's node. Returns the number of merges."""
        done = 0
        for done in self.client.compact(stage or ""):
            if progress:
                progress(done)
        return done

    def verify(self, progress: Callable[[int, int], None] | None = None, *, untrusted: bool = False) -> VerifyReport:
        """The daemon verifies every byte of its layers; what is bad goes to quarantine there."""
        errors = self.client.check()
        layers = self.layers()
        return VerifyReport(len(layers), 0, sum(layer.bytes for layer in layers), tuple(errors))

    def layers(self) -> list[LayerStatus]:
        return self.client.layers()

    def status(self) -> StoreStatus:
        problems = dict(self.client.status(lag=False).problems)
        return replace(super().status(), path=self.client.address, problems=problems)

    def close(self) -> None:
        """Ends the connection, and forgets what was fetched unless `cache=` was given."""
        if not self._closed:
            super().close()
            self.client.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    def __repr__(self) -> str:
        return f"<nosync.Store at {self.client.address} ({'closed' if self._closed else 'connected'})>"


def is_here(about: pb.StatusReply) -> bool:
    """Returns whether the directory of the daemon that says this of itself is on this host."""
    data = Path(about.data)
    try:
        found = read_marker(data, env_of(data)).store_id
    except NosyncError:
        return False
    return found == about.store_id and (address_of(data) or {}).get("node") == about.node


def may_be_opened(about: pb.StatusReply) -> bool:
    """Returns whether the daemon's directory is here, and this user may go through its socket."""
    return is_here(about) and answers(Path(about.data) / SOCKET_FILE)


def by_its_socket(client: DaemonClient, about: pb.StatusReply) -> DaemonClient:
    """Returns on the daemon's host a client that goes through the socket in its directory, if this user may: the
    owner's.
    """
    found = client_of(Path(about.data)) if may_be_opened(about) else None
    if found is None:
        return client
    client.close()
    return found


def connected_store(client: DaemonClient, about: pb.StatusReply, cache: Path | None) -> Store:
    """Returns the store of a daemon that says this of itself. See `nosync.connect`."""
    temporary = None
    if cache is None:
        temporary = TemporaryDirectory(prefix="nosync-")
        cache = Path(temporary.name, "store")
    if not (cache / MARKER).exists():
        create_store(cache, about.key_groups, Env(), store_id=about.store_id)
    found = read_marker(cache, Env()).store_id
    if found != about.store_id:
        raise ReplicationError(
            f"{cache} keeps what was fetched of store {found}, and {client.address} serves store {about.store_id}: "
            "give another cache="
        )
    return RemoteStore(LayerDirectory(cache, about.key_groups, RemoteEnv(cache, client)), client, temporary)


@contextmanager
def daemon_of(store: Store) -> Iterator[DaemonClient | None]:
    """Gives the daemon that keeps a store; None where none does."""
    if isinstance(store, RemoteStore):
        yield store.client
        return
    client = client_of(store.directory.root)
    try:
        yield client
    finally:
        if client is not None:
            client.close()
