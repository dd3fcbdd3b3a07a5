"""What tasks publish, as a daemon notices it.

The node's scan is the safety net, and all there is where the system has no watch.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from nosync.lsm.model.layer import parse_path
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import CHECKPOINTS, LAYERS, MANIFESTS, REGISTERS
from nosync.replication.daemon.directory_watch import Watch


def watch_published(data: Path, env: Env) -> Watch:
    """Begins to watch what tasks publish. Raises OSError where the system has no watch to give."""
    watched = (LAYERS, MANIFESTS, CHECKPOINTS, *REGISTERS)
    for name in watched:
        env.make_dirs(data / name)
    return Watch([data.absolute() / name for name in watched])


def note_published(node: Node, paths: list[Path]) -> None:
    """Tells the node of files that appeared in its directory."""
    root = node.directory.root.absolute()
    checkpoints = root / CHECKPOINTS
    opaque = [PurePosixPath(path.relative_to(root)) for path in paths if path.is_relative_to(checkpoints)]
    if opaque:
        node.opaque.note(opaque)
        paths = [path for path in paths if not path.is_relative_to(checkpoints)]
    layers = [PurePosixPath(path.relative_to(root / LAYERS)) for path in paths if path.suffix == ".layer"]
    fresh = node.unknown(id for path in layers if (id := parse_path(path)) is not None)
    if fresh:
        node.note(fresh)
    published = [PurePosixPath(path.relative_to(root)) for path in paths if path.suffix == ".json"]
    if published:
        node.note_files(published)
