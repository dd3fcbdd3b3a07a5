"""A daemon's configuration from a TOML file. `docs/daemons.md` lists the fields, from `DaemonConfig`."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from nosync.lsm.errors import ReplicationError
from nosync.replication.daemon.daemon import DaemonConfig

_TYPES = {"replicas": int, "retain": int, "archive_epochs": int, "key_groups": int, "nice": int}


def read_config(path: Path) -> dict[str, Any]:
    """The fields that a file gives. Raises ReplicationError naming the file, the field, and what was expected."""
    try:
        fields = tomllib.loads(path.read_text())
    except OSError as error:
        raise ReplicationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReplicationError(f"{path} is not a text in UTF-8, as TOML is: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ReplicationError(f"{path} is not TOML: {error}") from error
    known = [f.name for f in dataclasses.fields(DaemonConfig)]
    for name, value in fields.items():
        if name not in known:
            raise ReplicationError(f"{path}: unknown field {name!r}; fields: {', '.join(known)}")
        expected = dict if name == "peers" else _TYPES.get(name, str)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ReplicationError(f"{path}: {name} is {value!r}, expected {expected.__name__}")
    for node, address in fields.get("peers", {}).items():
        if not isinstance(address, str):
            raise ReplicationError(f"{path}: peers.{node} is {address!r}, expected HOST:PORT")
    for name in ("data", "tls", "sockets"):
        if name in fields:
            if not fields[name]:
                raise ReplicationError(f"{path}: {name} is empty, expected the path of a directory")
            fields[name] = path.parent / fields[name]
    return fields


def make_config(fields: dict[str, Any], where: str) -> DaemonConfig:
    """Raises ReplicationError where a field that has no default is missing."""
    for name in ("node", "data"):
        if name not in fields:
            raise ReplicationError(f"{where}: {name} is not given; it has no default")
    return DaemonConfig(**fields)


def explain_config(config: DaemonConfig) -> list[tuple[str, str, str]]:
    """By field: name, value, and what it means, from the class."""
    import ast  # noqa: PLC0415 - only for --check
    import inspect  # noqa: PLC0415

    (node,) = ast.parse(inspect.getsource(DaemonConfig)).body
    assert isinstance(node, ast.ClassDef), "it is a class"
    found = []
    for field, text in zip(node.body, node.body[1:], strict=False):
        documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
            name = field.target.id
            meaning = str(text.value.value)  # type: ignore[attr-defined]
            found.append((name, str(getattr(config, name)), " ".join(meaning.split())))
    return found
