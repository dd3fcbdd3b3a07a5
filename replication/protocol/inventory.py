"""What a node holds, and what another node holds and this one is missing. Pure; names and digests only, never contents.

Invariants
- A layer counts as held when layers of its trace cover its time range: a merged layer stands for what it was merged
  from.
- Nodes merge for themselves, so layers of two nodes may overlap in part. What is wanted is what covers time that ours
  do not; reading puts up with the overlap (`choose_cover` in nosync.lsm.trace.trace).
- A manifest counts as held when an archive of its timeline covers its epoch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from blake3 import blake3

from nosync.lsm.model.layer import Description
from nosync.lsm.model.timestamp import Time
from nosync.replication.protocol.file_names import EPOCHS_OF_GROUP, LAYERS, FileName, FileVersion

_HASH_BITS = 128
_ORDER = attrgetter("name.order", "name")
_BEGIN = attrgetter("lower")


class Inventory:
    """A set of held files, by name, trace and group, with a hash of all and of each group that does not depend on their
    order.
    """

    def __init__(self, held: Iterable[FileVersion] = ()) -> None:
        self._by_name: dict[str, FileVersion] = {}
        self._layers: dict[str, dict[Description, FileName]] = {}
        self._stretches: dict[str, Stretches] = {}  # of traces that were asked about since they changed
        self._groups: dict[str, _Group] = {}
        self._archives: dict[str, set[Description]] = {}  # by directory of a timeline, their time ranges
        self._archived: dict[str, Stretches] = {}
        self._sum = 0
        for one in held:
            self.add(one)

    def add(self, held: FileVersion) -> None:
        name = held.name
        self.discard(name)
        self._by_name[name] = held
        hashed = _hash_of(held)
        self._sum += hashed
        self._groups.setdefault(name.group, _Group()).add(held, hashed)
        if name.layer is not None:
            self._layers.setdefault(name.place, {})[name.layer.description] = name
            self._stretches.pop(name.place, None)
        elif (archive := name.archive) is not None:
            self._archives.setdefault(archive[0], set()).add(archive[1])
            self._archived.pop(archive[0], None)

    def discard(self, text: str) -> None:
        held = self._by_name.pop(text, None)
        if held is None:
            return
        hashed, name = _hash_of(held), held.name
        self._sum -= hashed
        self._groups[name.group].discard(name, hashed)
        if not self._groups[name.group].held:
            del self._groups[name.group]
        if name.layer is not None:
            of_trace = self._layers[name.place]
            del of_trace[name.layer.description]
            self._stretches.pop(name.place, None)
            if not of_trace:
                del self._layers[name.place]
        elif (archive := name.archive) is not None:
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
        """Returns a hash that is equal for equal inventories."""
        return _root(len(self._by_name), self._sum)

    def groups(self) -> dict[str, str]:
        """Returns the root of each group, by name."""
        return {name: group.root for name, group in self._groups.items()}

    def of_group(self, group: str) -> list[FileVersion]:
        """Returns what is held of a group, in the order in which it came."""
        found = self._groups.get(group)
        return [] if found is None else list(found.held.values())

    def of_checkpoint(self, checkpoint: str) -> Iterator[FileName]:
        """Yields the names of the files that are held of a kept checkpoint: `checkpoints/<name>`."""
        for group, found in self._groups.items():
            if group.startswith(checkpoint):
                yield from (name for name in found.held if name.placed == checkpoint)

    def traces(self) -> list[str]:
        return sorted(self._layers)

    def has_at(self, place: str) -> bool:
        """Returns whether anything is held of a trace, or this other file is."""
        return place in self._layers or place in self._by_name

    def layers(self, trace: str) -> dict[Description, FileName]:
        """Returns by description the names of the layers of a trace."""
        return self._layers.get(trace, {})

    def holds(self, name: FileName, digest: str) -> bool:
        """Returns whether this very file is held, or layers that stand for it. Another digest under its name is not."""
        exact = self._by_name.get(name)
        if exact is not None:
            return exact.digest == digest
        if name.layer is None:
            return self.has_archived(name)
        trace = name.place
        if trace not in self._stretches:
            self._stretches[trace] = _stretches(self.layers(trace))
        return _is_within(self._stretches[trace], name.layer.description)

    def has_archived(self, name: FileName) -> bool:
        """Returns whether a file is a manifest for which an archive stands."""
        span = name.span
        if span is None or span.first < span.last or not self._archives.get(span.timeline):
            return False
        if span.timeline not in self._archived:
            self._archived[span.timeline] = _stretches(self._archives[span.timeline])
        return _is_within(self._archived[span.timeline], Description.of_epoch(span.first))

    def manifests_of(self, archive: FileName) -> list[FileName]:
        """Returns the manifests that an archive stands for, and that have files of their own."""
        span = archive.span
        if span is None or span.first == span.last:
            return []
        groups = range(span.first // EPOCHS_OF_GROUP, span.last // EPOCHS_OF_GROUP + 1)
        names = (name for group in groups if (of := self._groups.get(f"{span.timeline}/{group}")) for name in of.held)
        return [name for name in names if name.span is not None and span.first <= name.span.first <= span.last]


@dataclass
class _Group:
    held: dict[FileName, FileVersion] = field(default_factory=dict)
    sum: int = 0
    _root: str = ""

    def add(self, held: FileVersion, hashed: int) -> None:
        self.held[held.name] = held
        self.sum, self._root = self.sum + hashed, ""

    def discard(self, name: FileName, hashed: int) -> None:
        self.held.pop(name, None)
        self.sum, self._root = self.sum - hashed, ""

    @property
    def root(self) -> str:
        """Returns the hash of the group. It is made when it is asked for, and kept until the group changes."""
        if not self._root:
            self._root = _root(len(self.held), self.sum)
        return self._root


def _root(count: int, total: int) -> str:
    return f"{count}:{total % (1 << _HASH_BITS):x}"


def _hash_of(held: FileVersion) -> int:
    return int.from_bytes(blake3(f"{held.name}\0{held.digest}".encode()).digest(length=_HASH_BITS // 8), "big")


def covers(layers: Iterable[Description], wanted: Description) -> bool:
    """Returns whether layers together cover a time range without a hole."""
    return _is_within(_stretches(layers), wanted)


Stretches = tuple[list[Time], list[Time]]
"""Where time is covered: the beginnings and the ends of stretches that do not meet, in order."""


def _stretches(layers: Iterable[Description]) -> Stretches:
    begins: list[Time] = []
    ends: list[Time] = []
    for d in sorted(layers, key=_BEGIN):
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
    """Returns what to fetch from a node that holds `theirs`, in order. Groups that are the same are not looked into."""
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


def missing_of_trace(mine: Mapping[Description, FileName], theirs: Inventory, trace: str) -> list[FileVersion]:
    """Returns what to fetch of one trace, of which `mine` is there."""
    found = (theirs.get(name) for name in _missing_layers(mine, theirs.layers(trace)))
    return [held for held in found if held is not None]


def in_order(wanted: Iterable[FileVersion]) -> list[FileVersion]:
    """Returns files in the order in which they are fetched, see `FileName.order`."""
    return sorted(wanted, key=_ORDER)


def _missing_layers(mine: Mapping[Description, FileName], theirs: Mapping[Description, FileName]) -> list[FileName]:
    """Returns the widest of their layers that hold anything which ours do not."""
    ours = _stretches(mine)
    lacking = [d for d in theirs if d not in mine and not _is_within(ours, d)]
    chosen: list[Description] = []
    # Of two of the same time range, the one that was merged last: the other goes soon.
    for d in sorted(lacking, key=lambda d: (d.lower, -d.upper, -d.since)):
        if not chosen or d.upper > chosen[-1].upper:
            chosen.append(d)
    return [theirs[d] for d in chosen]
