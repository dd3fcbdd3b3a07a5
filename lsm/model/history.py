"""Where a stage's layers are over time: which fingerprint and how many shards wrote each stretch of epochs.

Invariants
- A history's spans are contiguous and in order; each begins where the one before ends.
- Nothing is rewritten when the number of shards (or the code, on a branch) changes: the state of a new shard is a view
  over the old traces whose key groups it shares, oldest first, and its own trace from then on. Keys of
  different old shards are disjoint, so the newest entry per key is still the state.
- A log (a stage without a key) is read span by span: its rows belong to no key group.
- A span that replaces what was before is made of its own layers alone: a stage that began anew with another key or other
  columns, whose rows cannot be read together with those before.

This is Flink's rescaling by key groups without its redistribution of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nosync.lsm.errors import SchemaError
from nosync.lsm.model.layer import Shard, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Time, epoch_of, last_of


@dataclass(frozen=True)
class Span:
    """Says which fingerprint and number of shards a stage's layers have in `[lower, upper)`."""

    fingerprint: str
    shard_count: int
    """0: the caller places keys, so each shard is a stage of its own."""
    lower: Time
    upper: Time = END_OF_TIME
    replaces: bool = False
    """Whether nothing of the layers before it counts from `lower` on."""

    def trace(self, stage: str, index: int) -> TraceId:
        return TraceId(stage, self.fingerprint, Shard(index, self.shard_count))


History = tuple[Span, ...]


def continued(history: History, fingerprint: str, shard_count: int, lower: Time, *, replaces: bool = False) -> History:
    """Returns the history, where layers of this fingerprint and number of shards are written from `lower` on, before
    any is sealed.
    """
    at = span_at(history, lower)
    if at is not None and (at.fingerprint, at.shard_count) == (fingerprint, shard_count):
        return history
    before = tuple(replace(span, upper=min(span.upper, lower)) for span in history if span.lower < lower)
    return (*before, Span(fingerprint, shard_count, lower, replaces=replaces))


def replaced_at(history: Sequence[Span], time: Time) -> Time | None:
    """Returns where what a stage is made of at a time begins, if that replaced what was before."""
    return next((span.lower for span in reversed(history) if span.replaces and span.lower <= time), None)


def counting(history: Sequence[Span], time: Time) -> History:
    """Returns the spans that a stage is made of at a time: those that begin up to it, and were not replaced."""
    begin = replaced_at(history, time)
    return tuple(span for span in history if span.lower <= time and (begin is None or span.lower >= begin))


def check_not_replaced(history: Sequence[Span], after: int, until: int, whose: str) -> None:
    """Raises SchemaError where a stage replaced what was before between two epochs: no change leads from rows to others
    with another key or other columns.
    """
    begin = replaced_at(history, last_of(until))
    if begin is not None and last_of(after) < begin and any(span.lower < begin for span in history):
        t = epoch_of(begin)
        raise SchemaError(
            f"{whose}: it has another key or other columns from epoch {t} on, where it began anew with another query, so no "
            f"changes lead there from epoch {after}: ask for those up to {t - 1}, and for those after {t}; or read it as of both"
        )


@dataclass(frozen=True)
class Part:
    """A stretch of one trace that is part of a view."""

    trace: TraceId
    lower: Time | None
    """None: wherever the trace begins."""
    upper: Time


@dataclass(frozen=True)
class View:
    """Says what one shard's state is made of: its own trace from `origin` on, above stretches of older traces."""

    id: TraceId
    origin: Time | None = None
    """Where the trace begins; None where no manifest says so."""
    upper: Time = END_OF_TIME
    base: tuple[Part, ...] = ()


def span_at(history: Sequence[Span], time: Time) -> Span | None:
    return next((span for span in history if span.lower <= time < span.upper), None)


def view_at(history: Sequence[Span], id: TraceId, time: Time, key_groups: int) -> View:
    """Returns what the state of a keyed stage's shard `id` at `time` is made of; `id` may begin a new span there."""
    begun = [span for span in history if span.lower < time or (span.lower == time and _is_of(span, id))]
    earlier = [*counting(begun, time)]
    origin = time
    if earlier and _is_of(earlier[-1], id):
        origin = earlier.pop().lower
    base = [
        Part(TraceId(id.stage, span.fingerprint, shard), span.lower, min(span.upper, origin))
        for span in earlier
        for shard in _overlapping(id.shard, span.shard_count, key_groups)
    ]
    return View(id, origin, base=tuple(base))


def _is_of(span: Span, id: TraceId) -> bool:
    return (span.fingerprint, span.shard_count) == (id.fingerprint, id.shard.count)


def _overlapping(shard: Shard, count: int, key_groups: int) -> list[Shard]:
    """Returns the shards of `count` that hold key groups of `shard`."""
    mine = shard.groups(key_groups)
    others = [Shard(i, count) for i in range(count)]
    return [o for o in others if o.groups(key_groups).start < mine.stop and mine.start < o.groups(key_groups).stop]


def views_of(history: Sequence[Span], stage: str, as_of: Time, key_groups: int, *, log: bool) -> list[View]:
    """Returns the views that together are a stage's state as of a time: one a shard; of a log, one a shard of each
    span.
    """
    if log:
        spans = counting(history, as_of)
        return [View(span.trace(stage, i), span.lower, span.upper) for span in spans for i in range(span.shard_count)]
    span = span_at(history, as_of)
    if span is None:
        return []
    ids = [span.trace(stage, i) for i in range(span.shard_count)]
    return [view_at(history, id, span.lower, key_groups) for id in ids]
