"""What a node holds, and what of another node's it is missing. Pure; names and digests only, never contents.

Invariants
- A layer counts as held when layers of its trace cover its time range: a merged layer stands for what it was merged
  from.
- Nodes merge for themselves, so layers of two nodes may overlap in part. What is wanted is what covers time that ours
  do not; reading puts up with the overlap (`choose_cover` in nosync.lsm.trace.trace).
- A manifest counts as held when an archive of its timeline covers its epoch.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NewType

from blake3 import blake3

from nosync.lsm.manifests import archive
from nosync.lsm.model.layer import Description, LayerId, parse_path
from nosync.lsm.model.timestamp import Time, end_of, is_number, pack
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS

NodeId = NewType("NodeId", str)
LAYERS = "layers"
EPOCHS_OF_GROUP = 1000
_NAMES_KEPT = 1 << 15
"""Of names, what they say: enough for what is looked at again and again; with all that ever came a daemon would only
grow.
"""
_HASH_BITS = 128


@dataclass(frozen=True, order=True)
class FileVersion:
    """One file of a store: its path relative to the data directory, and what it holds."""

    name: str
    digest: str
    size_bytes: int = 0


@functools.lru_cache(maxsize=_NAMES_KEPT)
def layer_of(name: str) -> LayerId | None:
    """The layer that a file is; None for a manifest, an archive or another small file."""
    prefix, _, rest = name.partition("/")
    return parse_path(PurePosixPath(rest)) if prefix == LAYERS else None


@functools.lru_cache(maxsize=_NAMES_KEPT)
def place_of(name: str) -> str:
    """The directory of a layer's trace, relative to that of all layers; of another file its own path."""
    return name[len(LAYERS) + 1 :].rpartition("/")[0] if name.startswith(f"{LAYERS}/") else name


@functools.lru_cache(maxsize=_NAMES_KEPT)
def epochs_of(name: str) -> tuple[str, int, int] | None:
    """Of a manifest or an archive of manifests: its timeline's directory, and its first and last epoch. None for
    another file.
    """
    directory, _, last = name.rpartition("/")
    if not directory.startswith(f"{MANIFESTS}/"):
        return None
    span = archive.epochs_of(last)
    return None if span is None else (directory, *span)


def archive_of(name: str) -> tuple[str, Description] | None:
    """Of an archive of manifests: its timeline's directory, and the time that it covers. None for another file."""
    span = epochs_of(name)
    return None if span is None or span[1] == span[2] else (span[0], Description(pack(span[1]), end_of(span[2])))


def group_of(name: str) -> str:
    """The group of files that a file belongs to: the layers of a trace, a thousand manifests of a timeline, another
    directory.
    """
    span = epochs_of(name)
    if span is not None and span[1] == span[2]:
        return f"{span[0]}/{span[1] // EPOCHS_OF_GROUP}"
    return name.rpartition("/")[0]


def name_of(id: LayerId) -> str:
    return f"{LAYERS}/{id.path}"


class Inventory:
    """A set of held files, by name, trace and group, with a hash of all and of each group that does not depend on their
    order.
    """

    def __init__(self, held: Iterable[FileVersion] = ()) -> None:
        self._by_name: dict[str, FileVersion] = {}
        self._layers: dict[str, dict[Description, str]] = {}
        self._stretches: dict[str, Stretches] = {}  # of traces that were asked about since they changed
        self._groups: dict[str, _Group] = {}
        self._archives: dict[str, set[Description]] = {}  # by directory of a timeline, their time ranges
        self._archived: dict[str, Stretches] = {}
        self._sum = 0
        for one in held:
            self.add(one)

    def add(self, held: FileVersion) -> None:
        self.discard(held.name)
        self._by_name[held.name] = held
        hashed = _hash_of(held)
        self._sum += hashed
        self._groups.setdefault(group_of(held.name), _Group()).add(held, hashed)
        id = layer_of(held.name)
        if id is not None:
            trace = place_of(held.name)
            self._layers.setdefault(trace, {})[id.description] = held.name
            self._stretches.pop(trace, None)
        elif (archive := archive_of(held.name)) is not None:
            self._archives.setdefault(archive[0], set()).add(archive[1])
            self._archived.pop(archive[0], None)

    def discard(self, name: str) -> None:
        held = self._by_name.pop(name, None)
        if held is None:
            return
        hashed, group = _hash_of(held), group_of(name)
        self._sum -= hashed
        self._groups[group].discard(name, hashed)
        if not self._groups[group].held:
            del self._groups[group]
        id = layer_of(name)
        if id is not None:
            trace = place_of(name)
            of_trace = self._layers[trace]
            del of_trace[id.description]
            self._stretches.pop(trace, None)
            if not of_trace:
                del self._layers[trace]
        elif (archive := archive_of(name)) is not None:
            self._archives[archive[0]].remove(archive[1])
            self._archived.pop(archive[0], None)

    def get(self, name: str) -> FileVersion | None:
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[FileVersion]:
        return iter(sorted(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def root(self) -> str:
        """Equal for equal inventories."""
        return _root(len(self._by_name), self._sum)

    def groups(self) -> dict[str, str]:
        """By name, the root of each group."""
        return {name: group.root for name, group in self._groups.items()}

    def of_group(self, group: str) -> list[FileVersion]:
        """What is held of a group, in the order in which it came."""
        found = self._groups.get(group)
        return [] if found is None else list(found.held.values())

    def traces(self) -> list[str]:
        return sorted(self._layers)

    def has_at(self, place: str) -> bool:
        """Whether anything is held of a trace, or this other file is."""
        return place in self._layers or place in self._by_name

    def layers(self, trace: str) -> dict[Description, str]:
        """By description, the names of the layers of a trace."""
        return self._layers.get(trace, {})

    def holds(self, name: str, digest: str) -> bool:
        """Whether this very file is held, or layers that stand for it. Another digest under its name is not."""
        exact = self._by_name.get(name)
        if exact is not None:
            return exact.digest == digest
        id = layer_of(name)
        if id is None:
            return self.has_archived(name)
        trace = place_of(name)
        if trace not in self._stretches:
            self._stretches[trace] = _stretches(self.layers(trace))
        return _is_within(self._stretches[trace], id.description)

    def has_archived(self, name: str) -> bool:
        """Whether a file is a manifest for which an archive stands."""
        span = epochs_of(name)
        if span is None or span[1] < span[2] or not self._archives.get(span[0]):
            return False
        if span[0] not in self._archived:
            self._archived[span[0]] = _stretches(self._archives[span[0]])
        return _is_within(self._archived[span[0]], Description.of_epoch(span[1]))

    def manifests_of(self, archive: str) -> list[str]:
        """Those that an archive stands for, of which there are files of their own."""
        span = epochs_of(archive)
        if span is None or span[1] == span[2]:
            return []
        directory, first, last = span
        groups = range(first // EPOCHS_OF_GROUP, last // EPOCHS_OF_GROUP + 1)
        names = (name for group in groups if (of := self._groups.get(f"{directory}/{group}")) for name in of.held)
        return [name for name in names if (one := epochs_of(name)) is not None and first <= one[1] <= last]


@dataclass
class _Group:
    held: dict[str, FileVersion] = field(default_factory=dict)
    sum: int = 0
    _root: str = ""

    def add(self, held: FileVersion, hashed: int) -> None:
        self.held[held.name] = held
        self.sum, self._root = self.sum + hashed, ""

    def discard(self, name: str, hashed: int) -> None:
        self.held.pop(name, None)
        self.sum, self._root = self.sum - hashed, ""

    @property
    def root(self) -> str:
        """Made when it is asked for, and kept until the group changes."""
        if not self._root:
            self._root = _root(len(self.held), self.sum)
        return self._root


def _root(count: int, total: int) -> str:
    return f"{count}:{total % (1 << _HASH_BITS):x}"


def _hash_of(held: FileVersion) -> int:
    return int.from_bytes(blake3(f"{held.name}\0{held.digest}".encode()).digest(length=_HASH_BITS // 8), "big")


def covers(layers: Iterable[Description], wanted: Description) -> bool:
    """Whether layers together cover a time range without a hole."""
    return _is_within(_stretches(layers), wanted)


Stretches = tuple[list[Time], list[Time]]
"""Where time is covered: the beginnings and the ends of stretches that do not meet, in order."""


def _stretches(layers: Iterable[Description]) -> Stretches:
    begins: list[Time] = []
    ends: list[Time] = []
    for d in sorted(layers):
        if ends and d.lower <= ends[-1]:
            ends[-1] = max(ends[-1], d.upper)
        else:
            begins.append(d.lower)
            ends.append(d.upper)
    return begins, ends


def _is_within(stretches: Stretches, wanted: Description) -> bool:
    begins, ends = stretches
    at = bisect.bisect_right(begins, wanted.lower) - 1
    return at >= 0 and wanted.upper <= ends[at]


def missing(mine: Inventory, theirs: Inventory) -> list[FileVersion]:
    """What to fetch from a node that holds `theirs`, in order. Groups that are the same are not looked into."""
    ours, wanted = mine.groups(), []
    for group, root in theirs.groups().items():
        if ours.get(group) == root:
            continue
        if group.startswith(f"{LAYERS}/"):
            trace = group[len(LAYERS) + 1 :]
            wanted += missing_of_trace(mine.layers(trace), theirs, trace)
        else:
            members = theirs.of_group(group)
            wanted += [held for held in members if held.name not in mine and not mine.has_archived(held.name)]
    return in_order(wanted)


def missing_of_trace(mine: Mapping[Description, str], theirs: Inventory, trace: str) -> list[FileVersion]:
    """What to fetch of one trace, of which `mine` is there."""
    found = (theirs.get(name) for name in _missing_layers(mine, theirs.layers(trace)))
    return [held for held in found if held is not None]


def in_order(wanted: Iterable[FileVersion]) -> list[FileVersion]:
    """The log of branches first, as it was written, then the oldest epochs, and each manifest after its layers."""
    return sorted(wanted, key=lambda held: _order(held.name))


def _missing_layers(mine: Mapping[Description, str], theirs: Mapping[Description, str]) -> list[str]:
    """The widest of their layers that hold anything which ours do not."""
    ours = _stretches(mine)
    lacking = [d for d in theirs if d not in mine and not _is_within(ours, d)]
    chosen = [d for d in lacking if not any(o != d and o.covers(d) for o in lacking)]
    return [theirs[d] for d in sorted(chosen)]


@functools.lru_cache(maxsize=_NAMES_KEPT)
def _order(name: str) -> tuple[int, int, str]:
    id = layer_of(name)
    if id is not None:
        return (int(id.description.upper), 0, name)
    span = epochs_of(name)
    if span is not None:
        return int(end_of(span[2])), 1, name
    number = name.removeprefix(f"{BRANCHES}/").removesuffix(".json")
    return (-2, int(number), name) if is_number(number) else (-1, 0, name)


def replica_set(trace: str, members: Iterable[NodeId], replicas: int) -> list[NodeId]:
    """The nodes that keep a trace: rendezvous hashing, so that a member more or less moves as little as possible.

    (Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.)
    """
    return sorted(members, key=lambda node: rank(node, trace), reverse=True)[:replicas]


@functools.lru_cache(maxsize=1 << 14)
def rank(node: NodeId, trace: str) -> bytes:
    """The higher, the earlier a node is one of those that keep a trace."""
    return blake3(f"{node}\0{trace}".encode()).digest()
