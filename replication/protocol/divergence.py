"""What of a peer's files belongs to another history than ours, as far as files of the same name with other contents
tell.

Two nodes that could not reach each other may each have let a job go on. What is merged says nothing of the contents
that it stands for, so a name alone does not tell whose it is: from the first epoch of a timeline that was sealed
otherwise, nothing of that peer's is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

from nosync.lsm.model.layer import Description
from nosync.lsm.model.timestamp import Time, is_number, pack
from nosync.lsm.platform.layout import BRANCHES
from nosync.replication.protocol.inventory import epochs_of, layer_of, place_of


def entry_of(name: str) -> int | None:
    """The number of an entry in the log of branches. None for another file."""
    directory, _, last = name.rpartition("/")
    number = last.removesuffix(".json")
    return int(number) if directory == BRANCHES and is_number(number) else None


def is_register(name: str) -> bool:
    """Whether a file is neither a layer nor a manifest nor an entry of the log: one that any node may add at any time."""
    return layer_of(name) is None and epochs_of(name) is None and entry_of(name) is None


@dataclass
class Divergence:
    """`conflicts`: names of files that both have, with different contents."""

    conflicts: InitVar[Iterable[str]] = ()
    _sealed: dict[str, int] = field(default_factory=dict)
    """By timeline's directory, the first epoch that was sealed otherwise."""
    _layers: dict[str, list[Description]] = field(default_factory=dict)
    _entry: int | None = None

    def __post_init__(self, conflicts: Iterable[str]) -> None:
        for name in conflicts:
            id, span, entry = layer_of(name), epochs_of(name), entry_of(name)
            if id is not None:
                self._layers.setdefault(place_of(name), []).append(id.description)
            elif span is not None:
                self._sealed[span[0]] = min(span[1], self._sealed.get(span[0], span[1]))
            elif entry is not None:
                self._entry = entry if self._entry is None else min(entry, self._entry)

    def has(self, name: str) -> bool:
        """Whether a file is of the other history, or may be."""
        id, span, entry = layer_of(name), epochs_of(name), entry_of(name)
        if id is not None:
            reached: Time = id.description.upper
            if any(reached > pack(first) for first in self._sealed.values()):
                return True
            others = self._layers.get(place_of(name), ())
            return not id.is_fresh and any(reached > d.lower and id.description.lower < d.upper for d in others)
        if span is not None:
            return span[0] in self._sealed and span[2] >= self._sealed[span[0]]
        return entry is not None and self._entry is not None and entry >= self._entry
