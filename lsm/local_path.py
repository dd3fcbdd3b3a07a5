"""Paths as users give them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nosync.lsm.errors import InvalidInputError

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_ADDRESS = re.compile(r"[A-Za-z0-9_.-]+:[0-9]{1,5}\Z")


def local_path(path: str | Path) -> Path:
    """A directory of this host, absolute, for the process may go to another one. `file:` and `~` are understood.

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
            f"{text} is not on this host: give a local directory, of which daemons keep copies on others (docs/operations.md)"
        )
    elif _ADDRESS.match(text) and not os.path.exists(text):
        raise InvalidInputError(f"{text} looks like a daemon's address: nosync.connect({text!r}) reads its store")
    return Path(text).expanduser().absolute()
