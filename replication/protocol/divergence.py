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
from nosync.lsm.model.timestamp import Time, pack
from nosync.replication.protocol.file_names import FileName


@dataclass
class Divergence:
    """`conflicts`: names of files that both have, with different contents."""

    conflicts: InitVar[Iterable[FileName]] = ()
    _sealed: dict[str, int] = field(default_factory=dict)
    """By timeline's directory, the first epoch that was sealed otherwise."""
    _layers: dict[str, list[Description]] = field(default_factory=dict)
    _entry: int | None = None

    def __post_init__(self, conflicts: Iterable[FileName]) -> None:
        for name in conflicts:
            layer, span, entry = name.layer, name.span, name.entry
            if layer is not None:
                self._layers.setdefault(name.place, []).append(layer.description)
            elif span is not None:
                self._sealed[span.timeline] = min(span.first, self._sealed.get(span.timeline, span.first))
            elif entry is not None:
                self._entry = entry if self._entry is None else min(entry, self._entry)

    def has(self, name: FileName) -> bool:
        """Returns whether a file is of the other history, or may be."""
        layer, span = name.layer, name.span
        if layer is not None:
            reached: Time = layer.description.upper
            if any(reached > pack(first) for first in self._sealed.values()):
                return True
            others = self._layers.get(name.place, ())
            return not layer.is_fresh and any(reached > d.lower and layer.description.lower < d.upper for d in others)
        if span is not None:
            return span.timeline in self._sealed and span.last >= self._sealed[span.timeline]
        entry = name.entry
        return entry is not None and self._entry is not None and entry >= self._entry
