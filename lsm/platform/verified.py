"""Whether this host's node has looked at everything in a data directory.

A layer's digest says that its bytes are what somebody wrote. Whether they are safe to read is another question: Arrow
follows the offsets in a forged batch to wherever they point. What tasks of this host publish is safe, and what its node
receives or adopts is validated in full first. So readers here need not validate, unless the directory came from
elsewhere: as a copy, from a backup, in an archive. The file VERIFIED tells the two apart. The node writes it once it
has looked at every layer that it found. It names this host and the directory's inode, which a copy does not have, and
which nobody who sends one can know.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

from blake3 import blake3

from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env, read_regular
from nosync.lsm.platform.json_file import replace_small, unseal_json
from nosync.lsm.platform.layout import VERIFIED

_MACHINE_ID = Path("/etc/machine-id")
_MOST_BYTES = 4096


def is_verified_here(root: Path) -> bool:
    """Returns whether a node of this host looked at all that is in this very directory."""
    path = root / VERIFIED
    try:
        fields, _ = unseal_json(read_regular(path, _MOST_BYTES), str(path))
        return fields.get("home") == _home(root)
    except (OSError, CorruptionError):  # then it is looked at again
        return False


def mark_verified(root: Path, env: Env) -> None:
    """Says so, durably. Raises StorageError."""
    replace_small(root, root / VERIFIED, {"home": _home(root)}, env)


def _home(root: Path) -> str:
    return blake3(f"{_host()} {os.stat(root).st_ino}".encode()).hexdigest()


@functools.cache
def _host() -> str:
    """Returns what tells this host from others. It is asked for each directory that is opened, and never changes."""
    try:
        found = _MACHINE_ID.read_text().strip()
    except OSError:  # in a container
        found = ""
    return found or socket.gethostname()
