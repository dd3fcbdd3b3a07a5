"""Kept checkpoints in a bucket, of which nodes may have put other histories under one name.

A node may put a batch that no peer has, and be lost; the query goes on from a peer, and runs that batch on other rows. Or
somebody removes what is kept by hand, and keeps another query under its name. A mixture of the two would be no
checkpoint of anything. So where files of batches differ, which are small and say what a batch read, a node puts all files
of that checkpoint itself, and of one checkpoint only the files of one node are seen: of the one that has come furthest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.platform.layout import CHECKPOINTS
from nosync.lsm.platform.opaque import checkpoint_of
from nosync.replication.protocol.file_names import FileName, FileVersion, parse_name
from nosync.replication.remote.pack import Contents, Placed

log = logging.getLogger("nosync.remote")

_COARSEST_CLOCK_S = 2.0
"""Two changes of a directory within this time may have one time of change."""
_OFFSETS, _COMMITS, _METADATA = "offsets", "commits", "metadata"


def _of_batches(name: FileName) -> tuple[str, ...] | None:
    """Returns the parts of the name of a file that says which query it is, or what a batch read; None for any other."""
    parts = tuple(name.split("/")[2:])
    return parts if parts == (_METADATA,) or (len(parts) == 2 and parts[0] in (_OFFSETS, _COMMITS)) else None


@dataclass
class _Listed:
    changed_ns: int
    first_s: float
    listed_s: float
    directories: list[str]


class ChangedFiles:
    """The files of kept checkpoints in directories that changed. There may be very many, and few are new."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self._seen: dict[PurePosixPath, _Listed] = {}

    def since_last(self) -> Iterator[PurePosixPath]:
        """Yields all files of each directory that may have changed since the last call; the first time all there are."""
        waiting, seen = [PurePosixPath(CHECKPOINTS)], dict[PurePosixPath, _Listed]()
        while waiting:
            at = waiting.pop()
            changed_ns, now_s, known = (
                self._env.changed_ns(self._root / at),
                self._env.monotonic_s(),
                self._seen.get(at),
            )
            if known is None or known.changed_ns != changed_ns:
                known = _Listed(changed_ns, now_s, now_s, [])
            elif known.listed_s - known.first_s >= _COARSEST_CLOCK_S:  # what came later has another time
                seen[at] = known
                waiting += [at / name for name in known.directories]
                continue
            entries = self._env.entries(self._root / at)
            known.listed_s, known.directories = now_s, [name for name, is_directory in entries if is_directory]
            seen[at] = known
            waiting += [at / name for name in known.directories]
            yield from (at / name for name, is_directory in entries if not is_directory)
        self._seen = seen


class CheckpointCopies:
    """Tells which files of the checkpoints of one node a bucket lacks. `digest_of`: of a file of this node; None: it is gone,
    or damaged.
    """

    def __init__(self, root: Path, env: Env, digest_of: Callable[[FileName], str | None]) -> None:
        self._root, self._env, self._digest_of = root, env, digest_of
        self._parted: set[str] = set()  # of these another history is in the bucket
        self._changed = ChangedFiles(root, env)
        self._looks_at_all = False
        self._known: dict[FileName, tuple[Identity, str | None]] = {}

    def names(self, *, looks_at_all: bool) -> list[FileName]:
        """Returns the files that may be lacking: those in directories that changed since the last call; else all."""
        if looks_at_all or self._looks_at_all:
            self._changed, self._looks_at_all = ChangedFiles(self._root, self._env), False
        paths = (str(path) for path in self._changed.since_last())
        named = (parse_name(path) for path in paths if checkpoint_of(path) is not None)
        return [name for name in named if name is not None]

    def is_lacking(self, name: FileName, mine: FileVersion | None, theirs: Sequence[FileVersion]) -> bool:
        """`mine`, `theirs`: what this node, and others, have put under the name."""
        checkpoint = checkpoint_of(name)
        assert checkpoint is not None, "it is a file of one"
        if checkpoint not in self._parted:
            told = [*([] if mine is None else [mine]), *theirs]
            if not told:
                return True
            digest = self._digest(name) if _of_batches(name) is not None else None
            if digest is None or all(one.digest == digest for one in told):
                return False
            self._parted.add(checkpoint)
            self._looks_at_all = True  # files that were the same as in the bucket are to be there beside them
            log.warning(
                "checkpoint %s: another history of it is in the bucket, under the same name: all of this one is put beside it",
                checkpoint,
            )
        digest = self._digest(name)
        return digest is not None and (mine is None or mine.digest != digest)

    def _digest(self, name: FileName) -> str | None:
        try:
            identity = self._env.identity(self._root / name)
        except FileNotFoundError:
            return None
        known = self._known.get(name)
        if known is None or known[0] != identity:
            known = self._known[name] = identity, self._digest_of(name)
        return known[1]


def of_one_node(
    nodes: Mapping[str, Contents], files: dict[FileName, Placed], others: dict[FileName, list[Placed]]
) -> None:
    """Leaves, of each checkpoint of which nodes have several histories, the files of one of them."""
    found = {checkpoint_of(name) for name in others if name.is_opaque and _of_batches(name) is not None}
    for checkpoint in sorted(filter(None, found)):
        held = {
            node: [one for one in contents.files() if _is_in(one.version.name, checkpoint)]
            for node, contents in nodes.items()
        }
        chosen = max(held, key=lambda node: (_last_commit(held[node]), node))
        for name in [name for name in files if _is_in(name, checkpoint)]:
            del files[name]
            others.pop(name, None)
        files |= {one.version.name: one for one in held[chosen]}
        log.warning(
            "checkpoint %s: nodes have several histories of it in the bucket; that of %s is seen", checkpoint, chosen
        )


def _is_in(name: FileName, checkpoint: str) -> bool:
    return name.is_opaque and checkpoint_of(name) == checkpoint


def _last_commit(files: Sequence[Placed]) -> int:
    numbers = [parts[1] for one in files if (parts := _of_batches(one.version.name)) and parts[0] == _COMMITS]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)
