"""Where a request leads. Nothing outside of the checkpoints has a place, whatever a request says.

/webhdfs/v1/<secret>                   all checkpoints
/webhdfs/v1/<secret>/<name>            a checkpoint: the checkpointLocation of a query
/webhdfs/v1/<secret>/<name>/<path>     a file of it
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from nosync.checkpoints.door.live_directory import DOOR
from nosync.checkpoints.door.remote_errors import denied, illegal
from nosync.checkpoints.door.secret import is_same
from nosync.checkpoints.generations import REWOUND, SETTINGS
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.layout import LOCK, PINS

PREFIX = b"/webhdfs/v1"
_MOST_PATH = 1024
"""The keep takes no longer name."""
_OF_THE_KEEP = (PINS, SETTINGS, LOCK, REWOUND, DOOR)


@dataclass(frozen=True)
class Place:
    """A checkpoint and a path in it. `name` is "" for all checkpoints, and `path` is "" for the checkpoint itself."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name}/{self.path}" if self.path else self.name


def place_of_target(raw_path: bytes, secret: str) -> Place:
    """Returns the place of a request by its target, as it was sent. Raises RemoteError, first of all without the secret."""
    has_prefix = raw_path.startswith(PREFIX + b"/")
    said, _, rest = raw_path[len(PREFIX) + 1 :].partition(b"/")
    _check_secret(said if has_prefix else b"", secret)
    try:
        return _place(unquote_to_bytes(rest).decode())
    except UnicodeDecodeError:
        raise illegal("the path is not UTF-8") from None


def place_of_path(path: str, secret: str) -> Place:
    """Returns the place of a path that a parameter names: the same without the prefix. Raises RemoteError."""
    is_absolute = path.startswith("/")
    said, _, rest = path[1:].partition("/")
    _check_secret(said.encode(errors="replace") if is_absolute else b"", secret)
    return _place(rest)


def _check_secret(said: bytes, secret: str) -> None:
    if not is_same(said, secret):
        raise denied(
            "the address has to begin with the secret of this door; `nosync checkpoint address` shows it",
            ends_connection=True,
        )


def _place(text: str) -> Place:
    parts = text.removesuffix("/").split("/") if text else []
    for part in parts:
        if part in ("", ".", "..") or not part.isprintable():
            raise illegal(f"{text[:_MOST_PATH]!r} is not the path of a file: a part of it is {part[:64]!r}")
    if not parts:
        return Place("", "")
    try:
        place = Place(check_name(parts[0], "checkpoint name"), "/".join(parts[1:]))
    except InvalidInputError as error:
        raise illegal(str(error)) from None
    if parts[1:] and parts[1] in _OF_THE_KEEP:
        raise illegal(f"/{place}: {parts[1]} is a name of the keep, which no file of a checkpoint has")
    if len(place.path) > _MOST_PATH:
        raise illegal(f"a path has at most {_MOST_PATH} characters in a checkpoint, and this one has {len(place.path)}")
    return place
