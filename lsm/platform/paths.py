"""Paths as users give them."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.platform.env import advice, storage_error

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_ADDRESS = re.compile(r"[A-Za-z0-9_.-]+:[0-9]{1,5}\Z")


_WHY = "what is there must appear under its name whole or not at all, which an object store has no rename or link for"
_STORE_INSTEAD = (
    "Give a local directory, of which daemons keep copies on other hosts (docs/daemons.md), and remote= in an object store "
    "(docs/remote.md)"
)


def local_path(path: str | Path, what: str = "a store", instead: str = _STORE_INSTEAD) -> Path:
    """Returns a directory of this host, absolute, for the process may go to another one. `file:` and `~` are
    understood.

    `what` the path is of, and what to do `instead` of another file system, are said where it is refused.

    Raises InvalidInputError for what another file system or a daemon keeps, of which Path would make a directory here,
    and for what can be no directory; StorageError where this user may not look.
    """
    text = checked_text(path, what, instead)
    if _ADDRESS.match(text) and not os.path.exists(text):
        raise InvalidInputError(f"{text} looks like a daemon's address: nosync.connect({text!r}) reads its store")
    try:
        found = Path(text).expanduser().absolute()
    except (RuntimeError, FileNotFoundError) as error:  # no such user; the working directory is gone
        raise InvalidInputError(f"{text}: {error}; give an absolute path") from None
    _check_way(found)
    return found


def checked_text(path: str | Path, what: str = "a store", instead: str = _STORE_INSTEAD) -> str:
    """Returns a path of this host as text, without `file:`. What is there is not looked at. Raises InvalidInputError for what
    another file system has, and for what no directory is called.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidInputError(f"{path!r} is a {type(path).__name__}, expected the path of a directory")
    text = os.fspath(path)
    _check_text(text)
    uri = _URI.match(text)
    if uri is None:
        return text
    if uri[1].lower() != "file":
        raise InvalidInputError(
            f"{text} is not on this host: {what} is a directory of a file system that this host has or mounts, for "
            f"{_WHY}. {instead}"
        )
    return f"/{text[uri.end() :]}"


def _check_text(text: object) -> None:
    """Raises InvalidInputError for what no directory is called, or what cannot be said in JSON, to RocksDB and to Spark."""
    if not isinstance(text, str):
        raise InvalidInputError(f"{text!r} is a {type(text).__name__}, expected the path of a directory as text")
    if not text:
        raise InvalidInputError("the path is empty: give that of a directory; '.' is the one that this process is in")
    if "\0" in text:
        raise InvalidInputError(f"{text!r} has a character of number 0, which no path can have")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{text!r} is not UTF-8: rename the directory, or give a symlink to it") from None


def _check_way(path: Path) -> None:
    """Raises InvalidInputError for a path that no directory can ever have as it is."""
    try:
        os.stat(path)
    except FileNotFoundError:
        link = next((one for one in (path, *path.parents) if one.is_symlink() and not one.exists()), None)
        if link is not None:
            raise InvalidInputError(
                f"{link} is a symlink to {os.readlink(link)}, which does not exist: make that first, or remove the symlink"
            ) from None
    except NotADirectoryError:
        file = next(one for one in path.parents if one.is_file())
        raise InvalidInputError(f"{file} is a file, so {path} cannot be a directory in it") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise InvalidInputError(f"{path}: {error.strerror}; {advice(error.errno)}") from None
        raise storage_error("open", path, error) from error
