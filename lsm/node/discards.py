"""Contents that an operator gives up, because another node's count: what goes with them, and that they do not come
back.

A third node may hold them as well, until it gives them up in its turn. So they are remembered, by name and digest, and
that is durable before the files go: from a peer nothing is taken that has these contents, or is built upon them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.archive import epochs_of
from nosync.lsm.manifests.branches import BRANCHES
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Epoch, is_number, pack
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import read_small, replace_small
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.trace.directory import MANIFESTS, LayerDirectory

log = logging.getLogger("nosync")

DISCARDED = "given-up.json"
"""In the directory: the contents that an operator gave up here."""


class DiscardedVersions:
    """By file, relative to the data directory, the digest of what was given up. Of this directory alone."""

    def __init__(self, root: Path, env: Env) -> None:
        self._root, self._env = root, env
        self.digests: Mapping[str, str] = {}
        if (root / DISCARDED).exists():
            try:
                fields = read_small(root / DISCARDED, env)
                with parsed("what was given up", str(root / DISCARDED)):
                    self.digests = {str(name): str(digest) for name, digest in fields["digests"].items()}
            except CorruptionError as error:
                log.error("%s: what was given up before may be taken from a peer that still holds it", error)

    def remember(self, digests: Mapping[str, str]) -> None:
        """These do not count any more. Durable when this returns. Where they took the place of what was given up
        before, that counts again.
        """
        is_reversed = any(self.digests.get(name, digest) != digest for name, digest in digests.items())
        kept = {**({} if is_reversed else self.digests), **digests}
        replace_small(self._root, self._root / DISCARDED, {"digests": kept}, self._env)
        self.digests = kept


def first_discarded(paths: Iterable[PurePosixPath]) -> dict[str, Epoch]:
    """By timeline, the first epoch whose manifest is among these files."""
    first: dict[str, Epoch] = {}
    for path in paths:
        if path.parts[0] == MANIFESTS and (span := epochs_of(path.name)) is not None:
            first[path.parts[1]] = Epoch(min(span[0], first.get(path.parts[1], span[0])))
    return first


def dependents_of(
    discarded: Iterable[PurePosixPath], directory: LayerDirectory, timelines: Timelines
) -> tuple[set[LayerId], set[PurePosixPath]]:
    """Of a manifest all that its timeline has from there on, layers that were merged with earlier ones included; of an
    entry of the log of branches those after it.
    """
    discarded = list(discarded)
    first = first_discarded(discarded)
    files: set[PurePosixPath] = set()
    for path in discarded:
        if path.parts[0] == BRANCHES:
            entries = [name for name in directory.env.list_dir(directory.root / BRANCHES) if is_number(name[:-5])]
            files |= {path.with_name(name) for name in entries if int(name[:-5]) > int(path.stem)}
    layers: set[LayerId] = set()
    for timeline, t in first.items():
        names = directory.env.list_dir(directory.root / MANIFESTS / timeline)
        files |= {
            PurePosixPath(MANIFESTS, timeline, name) for name in names if (span := epochs_of(name)) and span[1] >= t
        }
        for trace in {trace for piece in timelines.of_timeline(timeline).pieces(t - 1) for trace, _ in piece.traces()}:
            layers |= {LayerId(trace, d) for d in directory.descriptions(trace) if d.upper > pack(t)}
    return layers, files
