"""Opening a store: the node of its directory in this process, or the daemon that owns the directory, here or elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.errors import InvalidInputError, ReplicationError, StoreLockedError
from nosync.lsm.node.node import Node
from nosync.lsm.node.remote_status import forget_remote_status
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import MARKER, PLACE_FILE
from nosync.lsm.platform.paths import local_path
from nosync.lsm.settings import StoreSettings
from nosync.lsm.store.opened import note_opened
from nosync.lsm.store.opening import checked_marker, checked_settings, open_store
from nosync.lsm.store.store import Store
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.stubs import env_of
from nosync.replication.remote.url import is_remote_url
from nosync.replication.transport.daemon_files import ADDRESS_FILE, address_of, keeper_of

_ADDRESS = re.compile(r"[^/]+:[0-9]{1,5}")
DAEMON_PATIENCE_S = 10.0
"""How long `open` waits for the daemon of a directory: both may begin at boot."""
_LOOK_EVERY_S = 0.05


def open(
    path: str | Path,
    *,
    retain: int | None = None,
    key_groups: int | None = None,
    read_only: bool = False,
    alone: bool = False,
    remote: str | RemoteSettings | Sequence[str | RemoteSettings] | None = None,
    settings: StoreSettings | None = None,
    env: Env | None = None,
    hasher: Hasher = hash32,
) -> Store:
    """Opens the store in a directory, making a new one where there is none.

    Where a daemon keeps the directory the store works beside it: writing is the same, and the daemon makes durable,
    replicates and merges. A daemon that just starts is waited for, for up to 10 s; one that does not run is an error,
    unless `alone` is set: then this process is the node for so long, without peers, and what asks for several copies
    waits to be safe.

    `path`: a directory of this host. `retain`: epochs of history to keep readable (None: all). `key_groups` (default
    128): the most shards a stage can ever have; fixed when the store is made. `read_only`: no node, no lock, no
    writing; works beside the writer. `remote`: where copies are made in the background, in an object store, such as
    `s3://bucket/prefix` (docs/remote.md); several for several regions.

    A process opens a store once: the error of a second call names the timeline of the first, for were it the same
    store, closing one would close both. A store that nothing refers to any more is closed first. A process that is
    forked reads what its parent has open.

    Raises InvalidInputError for an address or a URI of another file system, NotAStoreError for a directory of something
    else, StoreLockedError where a process is its node already, ReplicationError where its daemon does not answer,
    FormatVersionError for a newer store, StorageError where the disk refuses, RemoteError where copies are refused at
    `remote`.
    """
    root, places = local_path(path), remote_settings(remote)
    env = env or env_of(root)
    if places and read_only:
        raise InvalidInputError("remote= is for who writes the store; nosync backup copies one that is only read")
    keeper = None if read_only else keeper_of(root)
    if keeper is None or alone:
        copies = 1 if keeper is None else keeper.replicas
        try:
            opened = open_store(
                root, retain=retain, key_groups=key_groups, read_only=read_only, settings=settings, env=env,
                hasher=hasher, copies=copies,
            )  # fmt: skip
            return opened if read_only else _with_copies(opened, places)
        except StoreLockedError as locked:
            if alone:
                raise StoreLockedError(f"{locked}. Where that is its daemon, leave out alone=True") from None
            # A daemon may have begun to keep it just now; or its token was lost, and it says where it is.
            if keeper_of(root) is None and address_of(root) is None:
                raise
    if places:
        raise InvalidInputError(f"{path} belongs to a daemon, which makes the copies: give it --remote instead")
    if retain is not None or checked_settings(settings).retain is not None:
        raise InvalidInputError(
            f"{path} belongs to a daemon, which decides how much history is kept: set its retain instead"
        )
    return _beside_daemon(LayerDirectory(root, checked_marker(root, env, key_groups).key_groups, env, hasher))


def remote_settings(remote: str | RemoteSettings | Sequence[str | RemoteSettings] | None) -> list[RemoteSettings]:
    """Returns where copies go, as `open` is given it. Raises InvalidInputError."""
    given = [] if remote is None else [remote] if isinstance(remote, str | RemoteSettings) else list(remote)
    found = [one if isinstance(one, RemoteSettings) else RemoteSettings(one) for one in given]
    if len({one.url for one in found}) < len(found):
        raise InvalidInputError("remote= names a place twice: each has one writer")
    return found


def _with_copies(store: Store, places: Sequence[RemoteSettings]) -> Store:
    """Begins to make copies of a store that was opened, and to fetch what it lacks where it was restored lazily."""
    node = store.node
    if not isinstance(node, Node):
        return store
    forget_remote_status(store.directory.root, store.directory.env)
    try:
        if node.directory.env.sees_stubs:
            from nosync.replication.remote.hydration import Hydration  # noqa: PLC0415 - mostly there is nothing to fetch

            Hydration(node).start()
        for place in places:
            from nosync.replication.remote.level import RemoteLevel  # noqa: PLC0415 - needs the extra `remote`

            RemoteLevel(node, place).start()
    except BaseException:
        store.close()
        raise
    return store


def connect(
    address: str,
    *,
    tls: str | Path | None = None,
    identity: str | None = None,
    node: str | None = None,
    cache: str | Path | None = None,
) -> Store:
    """Returns the store of the daemon at HOST:PORT; or of its copies in an object store, at `s3://bucket/prefix`.

    Of copies the remotely safe epochs are seen. What is asked for is fetched by ranges, compared with digests, and kept in
    `cache`; they are read, and not written.

    On the daemon's own host, and as its user, that is what `open` of its directory returns. From elsewhere it can be
    read: what is asked for is fetched, verified, and kept in `cache` (default: until the store is closed); with `cache`
    that is so on the daemon's host too. Off loopback `tls` is a directory with `ca.pem`, `<identity>.pem` and
    `<identity>.key` (nosync certs makes them), and `node` the id of the daemon's node, which its certificate must show.
    Raises ReplicationError where the daemon does not answer, or serves another store than `cache` keeps.
    """
    if is_remote_url(address):
        from nosync.replication.remote.bucket_store import connect_bucket  # noqa: PLC0415 - needs the extra `remote`
        from nosync.replication.remote.cloud import open_bucket  # noqa: PLC0415

        if tls is not None or identity is not None or node is not None:
            raise InvalidInputError(f"{address} is an object store: tls=, identity= and node= are for daemons")
        return connect_bucket(open_bucket(address, to_read=True), None if cache is None else local_path(cache))
    try:
        from nosync.replication.client.remote_store import by_its_socket, connected_store, is_here, may_be_opened  # noqa: PLC0415 - needs the extra `daemon`
        from nosync.replication.transport.addresses import host_of  # noqa: PLC0415
        from nosync.replication.transport.channel import Certificates  # noqa: PLC0415
        from nosync.replication.transport.client import DaemonClient  # noqa: PLC0415
    except ImportError as error:
        raise ReplicationError(f"connecting needs the extra: pip install 'nosync[daemon]' ({error})") from None
    if (tls is None) != (identity is None):
        raise InvalidInputError("tls= and identity= belong together: a directory of certificates, and whose to show")
    certificates = None if tls is None or identity is None else Certificates.of_directory(local_path(tls), identity)
    host_of(address)
    client = DaemonClient(address, certificates, node)
    try:
        about = client.status(lag=False)
        is_ours = may_be_opened(about) if certificates is None else is_here(about)
        if cache is not None or not is_ours:
            client = client if certificates is not None else by_its_socket(client, about)
            return connected_store(client, about, None if cache is None else local_path(cache))
    except BaseException:
        client.close()
        raise
    client.close()
    return open(about.data)


def open_to_read(path: str) -> Store:
    """Returns a store for who only reads it, on whatever host: the directory `path`, with what only peers have fetched
    by its daemon, or the store of the daemon at HOST:PORT (NOSYNC_TLS, NOSYNC_IDENTITY and NOSYNC_NODE say how it is
    reached off loopback), or the copies in an object store at a URL.
    """
    if is_remote_url(path) and not (path.startswith("file:") and (local_path(path) / MARKER).exists()):
        return connect(path)
    if _ADDRESS.fullmatch(path) and not Path(path).exists():
        tls, identity, node = (os.environ.get(f"NOSYNC_{name}") for name in ("TLS", "IDENTITY", "NODE"))
        return connect(path, tls=tls, identity=identity, node=node)
    store = open_store(path, read_only=True, env=env_of(local_path(path)))
    if (store.directory.root / ADDRESS_FILE).exists():
        from nosync.replication.client.fetching_directory import FetchingDirectory  # noqa: PLC0415 - needs the extra `daemon`

        found = store.directory
        store.directory = FetchingDirectory(found.root, found.key_groups, found.env, found.hasher)
    return store


def _beside_daemon(found: LayerDirectory) -> Store:
    """Returns the store beside the daemon that keeps a directory, once it answers.

    Nobody takes the directory's lock meanwhile, or the daemon could not start.
    """
    root, env = found.root, found.env
    try:
        from nosync.replication.client.fetching_directory import FetchingDirectory  # noqa: PLC0415
        from nosync.replication.client.remote_node import RemoteNode  # noqa: PLC0415 - needs the extra `daemon`
        from nosync.replication.transport.client import client_of  # noqa: PLC0415
    except ImportError as error:
        raise ReplicationError(
            f"{root} is kept by a daemon, beside which a store needs the extra: pip install 'nosync[daemon]' ({error}); "
            "or open it without peers: alone=True"
        ) from None
    directory = FetchingDirectory(root, found.key_groups, env, found.hasher)
    end_s, why = env.monotonic_s() + DAEMON_PATIENCE_S, "it does not run"
    while True:
        client = client_of(root)
        if client is not None:
            try:
                return note_opened(Store(directory, StoreSettings(), RemoteNode(directory, client)))
            except ReplicationError as error:
                client.close()
                why = str(error)
        if env.monotonic_s() >= end_s:
            raise ReplicationError(
                f"{root} is kept by a daemon, which was waited for {DAEMON_PATIENCE_S:.0f} s: {why}. Start it with nosync "
                "daemon, or open the store without it and its peers: alone=True (--alone). If no daemon is to keep it any "
                f"more, remove {root / PLACE_FILE}"
            )
        env.wait_s(_LOOK_EVERY_S)
