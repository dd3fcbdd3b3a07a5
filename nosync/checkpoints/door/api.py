"""Opening a door for the queries of this host, in this process."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from nosync.checkpoints.door.app import DoorApp
from nosync.checkpoints.door.gate import PATIENCE_S
from nosync.checkpoints.door.other_doors import OtherDoors
from nosync.checkpoints.door.secret import read_or_make_secret, written_for_owner
from nosync.checkpoints.door.served_checkpoints import DoorSettings, ServedCheckpoints
from nosync.checkpoints.peers import CountedCopies, is_kept_by_daemon, nodes_of
from nosync.checkpoints.places import data_directory
from nosync.checkpoints.retention import check_kept_batches
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there
from nosync.lsm.platform.layout import CHECKPOINT_LIVE, DOOR_ADDRESS
from nosync.lsm.visible import visible

if TYPE_CHECKING:
    from nosync.checkpoints.door.server import Server, Tls

HOST, PORT = "127.0.0.1", 7502
_CLIENT_WAITS_S = 60.0

Mode = Literal["async", "strict"]


class Door:
    """A door that is open. Use it in `with`, or call `close`. See `serve`."""

    def __init__(self, server: Server, checkpoints: ServedCheckpoints, secret: str) -> None:
        self._server, self._checkpoints = server, checkpoints
        self._root = f"{server.address}/{secret}"
        self._is_closed = False

    @property
    def port(self) -> int:
        """The port that the door listens on."""
        return self._server.port

    def address(self, name: str) -> str:
        """Returns the whole checkpointLocation of a query. It holds the secret of the door."""
        return f"{self._root}/{check_name(name, 'checkpoint name')}"

    def state(self, name: str) -> str | None:
        """Returns "async", or of strict mode "catching up", "strict" or "degraded"; None where no query has come yet."""
        return self._checkpoints.state(name)

    def problem(self, name: str) -> str | None:
        """Returns what keeps the newest batch from being kept; None when all is well."""
        return self._checkpoints.problem(name)

    def is_open(self) -> bool:
        """Returns whether queries are answered."""
        return not self._is_closed and self._server.is_running()

    def close(self) -> None:
        """Answers what was asked, takes in what is there yet, and ends."""
        if not self._is_closed:
            self._is_closed = True
            self._server.close()
            self._checkpoints.close()

    def __repr__(self) -> str:
        return visible(f"Door({self._server.address!r}, {'closed' if self._is_closed else 'open'})")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    store: str | os.PathLike[str] | None = None,
    port: int = 0,
    host: str = HOST,
    mode: Mode = "async",
    *,
    keep_batches: int | None = None,
    patience_s: float = PATIENCE_S,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
) -> Door:
    """Opens a door through which queries write their checkpoints, which are kept in `store` (default: $NOSYNC_DATA).

        with nosync.checkpoints.serve("/data/nosync") as door:
            writer.option("checkpointLocation", door.address("words")).start().awaitTermination()

    `port`: 0 takes any that is free. `mode`: "async", where Spark never waits; or "strict", where the next batch begins
    when the one before is durable in the keep, or after `patience_s`. `keep_batches`: of each checkpoint, by default as many
    as before, and 100 of a new one. `certificate`, `key`: needed off loopback; the
    address begins with swebhdfs:// then. `ca`: callers have to show a certificate of it. Raises InvalidInputError,
    StoreLockedError where the directory has a door already, StorageError.
    """
    _check_arguments(mode, keep_batches, patience_s)
    try:
        from nosync.checkpoints.door.server import Server  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise NosyncError(f"the door needs {error.name}: pip install 'nosync[daemon]'") from error
    tls = _tls_of(certificate, key, ca)
    data, env = data_directory(store), Env()
    is_strict = mode == "strict"
    nodes = nodes_of(data) if is_strict else 1
    copies = CountedCopies(data, env).fewest if nodes > 1 else None
    settings = DoorSettings(is_strict, nodes, patience_s, keep_batches, copies)
    with storage_errors("make", data):
        env.make_dirs(data)
    secret = read_or_make_secret(data, env)
    server = Server(host, port, tls)
    checkpoints = None
    try:
        root = f"{server.address}/{secret}"
        checkpoints = ServedCheckpoints(
            data, root, env, settings, OtherDoors(data, env) if is_kept_by_daemon(data) else None
        )
        with (
            written_for_owner(data, root, env) as written,
            storage_errors("write", data / CHECKPOINT_LIVE / DOOR_ADDRESS),
        ):
            env.replace(written, data / CHECKPOINT_LIVE / DOOR_ADDRESS)
        server.start(DoorApp(checkpoints, secret))
    except BaseException:
        server.close()
        if checkpoints is not None:
            checkpoints.close()
        raise
    return Door(server, checkpoints, secret)


def _check_arguments(mode: Mode, keep_batches: int | None, patience_s: float) -> None:
    if mode not in ("async", "strict"):
        raise InvalidInputError(f"mode {mode!r}: expected 'async' or 'strict'")
    if keep_batches is not None:
        check_kept_batches(keep_batches)
    if isinstance(patience_s, bool) or not isinstance(patience_s, int | float) or not 0 < patience_s < _CLIENT_WAITS_S:
        raise InvalidInputError(
            f"patience_s={patience_s!r}: expected seconds, less than the {_CLIENT_WAITS_S:g} for which Spark waits"
        )


def _tls_of(
    certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None, ca: str | os.PathLike[str] | None
) -> Tls | None:
    """Returns the certificates of a server; None for one without any."""
    if (certificate is None) != (key is None) or (ca is not None and certificate is None):
        raise InvalidInputError("give the certificate and its key; the CA goes with both")
    if certificate is None or key is None:
        return None
    from nosync.checkpoints.door.server import Tls  # noqa: PLC0415 - of the extra `daemon`

    return Tls(Path(certificate), Path(key), None if ca is None else Path(ca))


def address_of(name: str, store: str | os.PathLike[str] | None = None) -> str:
    """Returns the checkpointLocation of a query behind the door of a data directory, where it was last open.

    Raises InvalidInputError where it never was.
    """
    data, env = data_directory(store), Env()
    check_name(name, "checkpoint name")
    try:
        root = read_if_there(data / CHECKPOINT_LIVE / DOOR_ADDRESS, env).decode().strip()
    except FileNotFoundError:
        raise InvalidInputError(f"{data} has had no door: start `nosync checkpoint serve --store {data}`") from None
    return f"{root}/{name}"
