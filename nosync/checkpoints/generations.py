"""The directories of kept checkpoints: a rewind begins another one, and never changes one that is there.

    checkpoints/<name>/          the first generation
    checkpoints/<name>.<n>/      what a rewind began; it counts once its file `rewound.json` and all of that batch are there

So nodes that copy files in any order agree: files are only ever added, and the newest generation that is whole counts.
"""

from __future__ import annotations

from pathlib import Path

from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import CHECKPOINTS

REWOUND = "rewound.json"
"""In the directory of a later generation: which one it was made from, and the batch that it goes on after."""
SETTINGS = "settings"
"""In the directory of a keep: how many batches are kept, as an element of a set."""


def directory_of(name: str, generation: int) -> str:
    """Returns the name of a generation's directory in `checkpoints/`."""
    return f"{name}.{generation}" if generation else name


def keeps_of(data: Path, env: Env) -> list[str]:
    """Returns the names of the checkpoints that a data directory keeps."""
    return sorted({name for name, _ in _directories(data, env)})


def generations_of(data: Path, name: str, env: Env) -> list[int]:
    """Returns the generations of a checkpoint that have a directory, whole or not."""
    return sorted(generation for found, generation in _directories(data, env) if found == name)


def _directories(data: Path, env: Env) -> list[tuple[str, int]]:
    with storage_errors("list", data / CHECKPOINTS):
        env.list_dir(data / CHECKPOINTS)  # which refuses a link
        names = [name for name, is_directory in env.entries(data / CHECKPOINTS) if is_directory]
    parts = [name.partition(".") for name in names if not name.startswith(".")]
    return [(name, int(number or 0)) for name, dot, number in parts if not dot or is_number(number)]
