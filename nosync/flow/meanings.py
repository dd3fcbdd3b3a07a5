"""What words of a flow mean where it does not say it: in a new store what is right, in an older one what it began with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Meanings:
    """The meanings that a store was written with. Of stages that it does not name, and in a new store, they are today's."""

    policies: Mapping[str, str] = field(default_factory=dict)
    """Which watermark of several inputs windows go by. Today: that of the slowest."""
    taken_back: Collection[str] = frozenset()
    """The stages of which what was made of their rows is taken back when these expire. Today it stays."""
    strict: Collection[str] = frozenset()
    """The windows in which rows are late by the watermark of their own epoch. Today: by that of the epoch before."""
    unnamed: Collection[str] = frozenset()
    """The sources, and the outputs of functions, whose fingerprints have their columns alone. Today: their names too, or a
    stage that reads another one with the same columns would pass for what it was.
    """
    late_by_side: Collection[str] = frozenset()
    """The joins by event time where the fingerprints of each side's late rows have that side alone. Today: what the watermark
    has, too, for the other side says with it what is late.
    """


TODAYS = Meanings()
