"""What a store records with each epoch of the meanings that its flow has, so that newer versions go on with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import (
    FINAL,
    FIRST,
    INTERVAL_JOIN,
    OUTPUT,
    TIMED_UPDATE,
    WATERMARK,
    BoundStage,
    declared_of,
    part_of,
)
from nosync.flow.kinds import AGGREGATE, FORGET, JOIN, PART_SEPARATOR, PER_KEY, SOURCE, STATELESS, UPDATE, WINDOW
from nosync.flow.meanings import TODAYS, Meanings
from nosync.flow.stage_options import IntervalOptions, UpdateOptions
from nosync.kernels.asof_joins import AsofSpec
from nosync.kernels.windows import MAX, MIN
from nosync.lsm.manifests.manifest import Manifest

WATERMARK_POLICIES = "watermark_policies"
"""The key, in a manifest, that says of windows which watermark of several inputs they go by, if not the fastest."""
EXPIRIES = "expiries"
"""The key, in a manifest, that says of which stages rows that expire are forgotten, and not taken back."""
TAKEN_BACK = "expiries_taken_back"
"""The key, in a manifest, of the stages whose rows expire and are taken back. Where it is missing an earlier version wrote it,
and they are all that it does not say to be forgotten: of one that gets a time to live later, that would be wrong.
"""
LENIENT = "late_by_epoch_before"
"""The key, in a manifest, of the windows in which rows are late by the watermark of the epoch before."""
UNNAMED = "unnamed"
"""The key, in a manifest, of the sources and outputs whose fingerprints have their columns alone. Where it is missing an
earlier version wrote it, and they are all.
"""
AGGREGATES = "aggregates"
"""The key, in a manifest, that says by stage and output which aggregate function its state is of."""
BY_TIME = "by_time"
"""The key, in a manifest, that says by stage by which times, windows and bounds it holds rows: see `times_of`."""
OPERATORS = "operators"
"""The key, in a manifest, that says by stage, recorded or not, which operator it is: see `operator_of`."""
LATE_BY_BOTH_SIDES = "late_by_both_sides"
"""The key, in a manifest, of the joins by event time where the fingerprints of late rows have both sides."""
WATERMARK_PART = part_of("", WATERMARK)
ROWS, CHANGES_OF_ROWS, DEDUPE_OF_CHANGES, SESSION_WINDOW = (
    "rows",
    "changes of rows",
    "dedupe of changes",
    "session window",
)
OVER_CHANGES = " over changes"


def recorded_meanings(manifest: Manifest | None) -> Meanings:
    """Returns what the stages mean that an epoch lists. What versions before did not say is as it was in them."""
    if manifest is None:
        return TODAYS
    stages = {entry.id.trace.stage for entry in manifest.entries}
    windows = {name.removesuffix(WATERMARK_PART) for name in stages if name.endswith(WATERMARK_PART)}
    policies, forgotten = (_mapping(manifest.meta.get(key)) for key in (WATERMARK_POLICIES, EXPIRIES))
    lenient, taken_back, unnamed = (manifest.meta.get(key) for key in (LENIENT, TAKEN_BACK, UNNAMED))
    joins = frozenset(name for name, operator in _by_parts(stages).items() if operator == INTERVAL_JOIN)
    by_both = manifest.meta.get(LATE_BY_BOTH_SIDES)
    if not isinstance(taken_back, list):
        taken_back = [name for name in stages if forgotten.get(name) != FORGET]
    return Meanings(
        {name: MIN if policies.get(name) == MIN else MAX for name in windows},
        frozenset(taken_back),
        frozenset(windows - set(lenient if isinstance(lenient, list) else ())),
        frozenset(stages if unnamed is None else unnamed),
        joins.difference(by_both if isinstance(by_both, list) else ()),
    )


@dataclass(frozen=True)
class RecordedStates:
    """What an epoch says, by stage, of what made the states. Versions before did not say it."""

    functions: Mapping[str, Mapping[str, Any]]
    """Of which aggregate functions they are, by output."""
    times: Mapping[str, Any]
    """By which windows, times and bounds they are made: what `times_of` was."""
    operators: Mapping[str, Any]
    """Which operators made them: what `operator_of` was. What a version before did not say is told by its parts, if it can."""


def recorded_states(manifest: Manifest) -> RecordedStates:
    """Returns what an epoch says of what made the states of its stages."""
    functions = {stage: _mapping(of) for stage, of in _mapping(manifest.meta.get(AGGREGATES)).items()}
    said = manifest.meta.get(OPERATORS)
    stages = {entry.id.trace.stage for entry in manifest.entries}
    operators = said if isinstance(said, Mapping) else _by_parts(stages)
    return RecordedStates(functions, _mapping(manifest.meta.get(BY_TIME)), operators)


def _by_parts(stages: Collection[str]) -> dict[str, str]:
    """Returns the operators, by stage, that are known by their parts."""
    found = {"seen": FIRST, "open": FINAL, "kept_left": INTERVAL_JOIN, "kept_rows": PER_KEY, "left": JOIN}
    return {name: kind for name in stages for part, kind in found.items() if part_of(name, part) in stages}


def operator_of(stage: BoundStage, flow: BoundFlow) -> str | None:
    """Returns which operator a stage is, and whether over rows that change: another one cannot go on from what it holds. None for
    what users do not name.
    """
    if stage.kind in (SOURCE, OUTPUT) or PART_SEPARATOR in stage.name:
        return None
    if stage.kind in STATELESS:
        return CHANGES_OF_ROWS if stage.changing else ROWS
    if stage.plan is not None and stage.plan.is_of_rows:
        return DEDUPE_OF_CHANGES
    if stage.kind == WINDOW and stage.window is not None and stage.window.session:
        return SESSION_WINDOW
    if stage.kind == TIMED_UPDATE:
        return UPDATE
    goes_by_contents = stage.kind in (AGGREGATE, JOIN, PER_KEY, UPDATE, WINDOW)
    is_over_changes = goes_by_contents and any(flow.stages[name].changing for name in stage.inputs)
    return stage.kind + (OVER_CHANGES if is_over_changes else "")


def times_of(stage: BoundStage) -> list[Any] | None:
    """Returns by which windows a stage groups rows, or by which times and bounds it joins them; None for another one. What
    it holds was made by these, and is of no use to others.
    """
    if isinstance(stage.options, IntervalOptions):
        spec, times = stage.options.spec, [side.times.time for side in stage.options.sides]
        bounds = [spec.within_us] if isinstance(spec, AsofSpec) else [spec.lower_us, spec.upper_us]
        return [type(spec).__name__, spec.join.how, *times, *bounds]
    window = stage.window
    if stage.kind != WINDOW or window is None:
        return None
    return [window.time, window.size_us, window.slide_us, window.session]


def _mapping(said: object) -> Mapping[str, Any]:
    return said if isinstance(said, Mapping) else {}


def meanings_to_record(flow: BoundFlow) -> dict[str, Any]:
    """Returns what an epoch's manifest says, for `recorded_meanings`. What is not used is not said, but for two keys."""
    windows = {declared_of(s.name): s.window for s in flow.stages.values() if s.kind == WATERMARK and s.window}
    may_expire = [s for s in flow.stages.values() if s.kind in (UPDATE, WINDOW)]
    taken_back = [s.name for s in may_expire if _is_bounded(s) and not s.expires]
    said: dict[str, Any] = {
        WATERMARK_POLICIES: {name: MIN for name, window in windows.items() if window.policy == MIN},
        EXPIRIES: {s.name: FORGET for s in may_expire if s.expires},
        LENIENT: sorted(name for name, window in windows.items() if window.is_lenient),
        AGGREGATES: {s.name: s.plan.functions for s in flow.recorded if s.plan is not None and s.plan.functions},
        BY_TIME: {s.name: times for s in flow.recorded if (times := times_of(s)) is not None},
        OPERATORS: {s.name: operator for s in flow.stages.values() if (operator := operator_of(s, flow)) is not None},
    }
    joins = {s.name: s.options for s in flow.stages.values() if s.kind == INTERVAL_JOIN}
    said[LATE_BY_BOTH_SIDES] = [
        name for name, of in joins.items() if isinstance(of, IntervalOptions) and not of.late_by_side
    ]
    unnamed = [s.name for s in flow.stages.values() if s.unnamed]
    return {key: value for key, value in said.items() if value} | {TAKEN_BACK: taken_back, UNNAMED: unnamed}


def _is_bounded(stage: BoundStage) -> bool:
    ttl = stage.options.ttl if isinstance(stage.options, UpdateOptions) else None
    return ttl is not None or (stage.window is not None and stage.window.keep_us is not None)
