"""What a daemon leaves in its directory: where it listens while it runs, and that it keeps the directory.

Jobs and commands read these files before they speak to the daemon, so nothing of gRPC is imported here.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import is_foreign, read_regular, storage_error
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.lsm.platform.parsing import parsed

log = logging.getLogger("nosync.replication")

ADDRESS_FILE = "daemon.json"
MOST_ADDRESS_BYTES = 1 << 20
"""Of what a daemon writes about itself."""


def address_of(root: Path) -> dict[str, Any] | None:
    """Returns what the daemon of a directory wrote about itself; None where none did, or somebody else did.

    Raises StorageError where this user may not read it: there is a daemon, and nothing else would say why it cannot be
    asked.
    """
    path = root / ADDRESS_FILE
    try:
        with parsed("what a daemon says of itself", str(path)):
            found: dict[str, Any] = json.loads(read_regular(path, MOST_ADDRESS_BYTES))
            texts = [found["address"], found["node"], *(found.get(name, "") for name in ("place", "tls"))]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("its fields are not all texts")
    except CorruptionError as error:
        if isinstance(error.__cause__, PermissionError):
            raise storage_error("read", path, error.__cause__) from error
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            log.warning("it is as if there were no daemon: %s", error)
        return None
    return found


@dataclass(frozen=True)
class Kept:
    """Holds what the daemon that keeps a directory leaves there. `token`: tells the directory from others on the host.
    `replicas`: on how many nodes it keeps each layer.
    """

    token: str | None
    replicas: int = 1


def keeper_of(root: Path) -> Kept | None:
    """Returns what the daemon that keeps a directory left there, whether it runs or not; None where none ever did."""
    try:
        text = read_regular(root / PLACE_FILE, MOST_ADDRESS_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if is_foreign(error):
            return Kept(None)
        raise storage_error("read", root / PLACE_FILE, error) from error
    with contextlib.suppress(CorruptionError), parsed("what a daemon left", str(root / PLACE_FILE)):
        found = json.loads(text)
        return Kept(found) if isinstance(found, str) else Kept(str(found["token"]), int(found["replicas"]))
    return Kept(None)  # damaged; a bare token is of an earlier version
