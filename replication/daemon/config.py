"""A daemon's configuration, and how it is read from a TOML file. `docs/daemons.md` lists the fields."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nosync.lsm.errors import InvalidInputError, ReplicationError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.paths import checked_text
from nosync.lsm.platform.store_marker import DEFAULT_KEY_GROUPS, check_key_groups
from nosync.lsm.settings import ARCHIVE_EPOCHS, StoreSettings
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.transport.addresses import host_of
from nosync.replication.transport.codec import check_node_id

SCAN_INTERVAL_S = 5.0
"""How often the directory is listed, in case that neither a job nor the watch told of something."""
MOST_NICE = 19
DOOR_MODES = ("async", "strict")
_TYPES = {"replicas": int, "retain": int, "archive_epochs": int, "key_groups": int, "nice": int, "new_store": bool}


@dataclass(frozen=True)
class DaemonConfig:
    """Says how one daemon runs. Every field but `node` and `data` has a default."""

    node: str
    """This node's id, unlike any other's: 1 to 64 of a-z, 0-9, _ and -."""
    data: Path
    """The data directory. A new one is made where there is none."""
    listen: str = "127.0.0.1:7500"
    """HOST:PORT for jobs and other nodes. Port 0: any free one."""
    peers: dict[str, str] = field(default_factory=dict)
    """Node id to HOST:PORT of every other node of the store."""
    replicas: int = 2
    """On how many nodes every layer is kept, this one included. The same on all nodes; more than there are is
    refused.
    """
    tls: Path | None = None
    """Directory with ca.pem, NODE.pem and NODE.key (nosync certs makes them). Needed off loopback."""
    sockets: Path | None = None
    """Without TLS: a directory of this user alone (mode 0700) where its daemons on this machine find each other.
    None: $XDG_STATE_HOME/nosync, or ~/.local/state/nosync.
    """
    metrics: str | None = None
    """HOST:PORT where Prometheus fetches metrics; none by default."""
    door: str | None = None
    """HOST:PORT where Structured Streaming queries write checkpoints that are kept (WebHDFS); none by default."""
    door_mode: str = "async"
    """async: queries never wait. strict: a batch begins when the one before is on as many nodes as `replicas` says."""
    remote: RemoteSettings | None = None
    """Where copies go in an object store: a URL, or a table with url, flush_s, flush_bytes, large_bytes, grace_s and
    close_s. The same on all nodes.
    """
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Name to path of every checkpoint of a query on this host that is watched, and kept."""
    retain: int | None = None
    """Epochs of history that stay readable; none: all."""
    archive_epochs: int | None = ARCHIVE_EPOCHS
    """Manifests of so many old epochs share one file. The same on all nodes."""
    key_groups: int = DEFAULT_KEY_GROUPS
    """Of a new store: the most shards that a stage can ever have."""
    new_store: bool = False
    """An empty data directory is the beginning of a new store, though some peers were not met: jobs need not wait for them.
    Without it such a node may be one whose disk was replaced, and the store is with a peer that is down.
    """
    nice: int = 0
    """How much smaller a share of the processors than tasks the process of `nosync daemon` gets, 0 (no smaller) to
    19. Where tasks keep all of them busy copies come later, and more is lost with a host.
    """

    def __post_init__(self) -> None:
        check_node_id(self.node)
        for node in self.peers:
            check_node_id(node)
        if self.node in self.peers:
            raise ReplicationError(f"node {self.node} is among its own peers: --node and --peer name different nodes")
        addresses = {"listen": self.listen, **{f"peers.{node}": address for node, address in self.peers.items()}}
        addresses |= {name: said for name in ("metrics", "door") if (said := getattr(self, name))}
        for field_name, address in addresses.items():
            try:
                host_of(address)
            except ReplicationError as error:
                raise ReplicationError(f"{field_name}: {error}") from None
        if self.door_mode not in DOOR_MODES:
            raise InvalidInputError(f"door_mode is {self.door_mode!r}, expected {' or '.join(DOOR_MODES)}")
        for name, path in self.checkpoints.items():
            check_name(name, "checkpoint name")
            if not path:
                raise InvalidInputError(f"checkpoints.{name} is empty, expected the path of a query's checkpoint")
            checked_text(path, f"checkpoints.{name}")
        for name in ("tls", "sockets"):
            if (directory := getattr(self, name)) is not None:
                checked_text(directory, name)
        check_key_groups(self.key_groups)
        if not 0 <= self.nice <= MOST_NICE:
            raise InvalidInputError(f"nice is {self.nice}, expected 0 to {MOST_NICE}")
        self.settings  # noqa: B018 - its fields are checked when it is made

    @property
    def settings(self) -> StoreSettings:
        """Returns what concerns the store. Raises InvalidInputError for values that none can have."""
        return StoreSettings(retain=self.retain, archive_epochs=self.archive_epochs, scan_interval_s=SCAN_INTERVAL_S)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the fields that a file gives. Raises ReplicationError naming the file, the field, and what was
    expected.
    """
    try:
        fields = tomllib.loads(path.read_text())
    except OSError as error:
        raise ReplicationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReplicationError(f"{path} is not a text in UTF-8, as TOML is: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ReplicationError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise ReplicationError(f"{path} is no configuration: its lists are one in another, without an end") from None
    known = [f.name for f in dataclasses.fields(DaemonConfig)]
    for name, value in fields.items():
        if name not in known:
            raise ReplicationError(f"{path}: unknown field {name!r}; fields: {', '.join(known)}")
        fields[name] = _checked(name, value, path)
    for table, what in (("peers", "HOST:PORT"), ("checkpoints", "a path")):
        for name, value in fields.get(table, {}).items():
            if not isinstance(value, str):
                raise ReplicationError(f"{path}: {table}.{name} is {value!r}, expected {what}")
    for name in ("data", "tls", "sockets"):
        if name in fields:
            if not fields[name]:
                raise ReplicationError(f"{path}: {name} is empty, expected the path of a directory")
            fields[name] = path.parent / fields[name]
    return fields


def _checked(name: str, value: Any, path: Path) -> Any:
    """Returns the value of a field, which has the type that it should have."""
    if name == "remote":
        return _remote(value, path)
    expected = dict if name in ("peers", "checkpoints") else _TYPES.get(name, str)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ReplicationError(f"{path}: {name} is {value!r}, expected {expected.__name__}")
    return value


def _remote(value: object, path: Path) -> RemoteSettings:
    """Returns where copies go, as a file says it."""
    given = {"url": value} if isinstance(value, str) else value
    known = [f.name for f in dataclasses.fields(RemoteSettings)]
    if not isinstance(given, dict) or "url" not in given:
        raise ReplicationError(f"{path}: remote is {type(value).__name__}, expected a URL, or a table with url")
    for name in given:
        if name not in known:
            raise ReplicationError(f"{path}: unknown field {name!r} of remote; fields: {', '.join(known)}")
    try:
        return RemoteSettings(**given)
    except InvalidInputError as error:
        raise ReplicationError(f"{path}: remote: {error}") from None


def make_config(fields: dict[str, Any], where: str) -> DaemonConfig:
    """Raises ReplicationError where a field that has no default is missing."""
    for name in ("node", "data"):
        if name not in fields:
            raise ReplicationError(f"{where}: {name} is not given; it has no default")
    return DaemonConfig(**fields)


def explain_config(config: DaemonConfig) -> list[tuple[str, str, str]]:
    """Returns name, value and meaning of each field, from the class."""
    import ast  # noqa: PLC0415 - only for --check
    import inspect  # noqa: PLC0415

    (node,) = ast.parse(inspect.getsource(DaemonConfig)).body
    assert isinstance(node, ast.ClassDef), "it is a class"
    found = []
    for one, text in zip(node.body, node.body[1:], strict=False):
        documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and documented:
            name = one.target.id
            meaning = str(text.value.value)  # type: ignore[attr-defined]
            found.append((name, str(getattr(config, name)), " ".join(meaning.split())))
    return found
