"""Paths as users give them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nosync.lsm.errors import InvalidInputError

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_ADDRESS = re.compile(r"[A-Za-z0-9_.-]+:[0-9]{1,5}\Z")


_WHY = "what is there must appear under its name whole or not at all, which an object store has no rename or link for"
_STORE_INSTEAD = "Give a local directory, of which daemons keep copies on other hosts (docs/operations.md)"


def local_path(path: str | Path, what: str = "a store", instead: str = _STORE_INSTEAD) -> Path:
    """A directory of this host, absolute, for the process may go to another one. `file:` and `~` are understood.

    `what` the path is of, and what to do `instead` of another file system, are said where it is refused.

    Raises InvalidInputError for what another file system or a daemon keeps, of which Path would make a directory here.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidInputError(f"{path!r} is a {type(path).__name__}, expected the path of a directory")
    text = os.fspath(path)
    uri = _URI.match(text)
    if uri is not None and uri[1].lower() == "file":
        text = f"/{text[uri.end() :]}"
    elif uri is not None:
        raise InvalidInputError(
            f"{text} is not on this host: {what} is a directory of a file system that this host has or mounts, for "
            f"{_WHY}. {instead}"
        )
    elif _ADDRESS.match(text) and not os.path.exists(text):
        raise InvalidInputError(f"{text} looks like a daemon's address: nosync.connect({text!r}) reads its store")
    return Path(text).expanduser().absolute()
