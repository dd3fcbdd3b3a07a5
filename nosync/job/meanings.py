"""What a store records with each epoch of the meanings that its flow has, so that newer versions go on with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import WATERMARK, BoundStage, declared_of, part_of
from nosync.flow.kinds import FORGET, UPDATE, WINDOW
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
WATERMARK_PART = part_of("", WATERMARK)


def recorded_meanings(manifest: Manifest | None) -> Meanings:
    """Returns what the stages mean that an epoch lists. What versions before did not say is as it was in them."""
    if manifest is None:
        return TODAYS
    stages = {entry.id.trace.stage for entry in manifest.entries}
    windows = {name.removesuffix(WATERMARK_PART) for name in stages if name.endswith(WATERMARK_PART)}
    policies, forgotten = (_mapping(manifest.meta.get(key)) for key in (WATERMARK_POLICIES, EXPIRIES))
    lenient, taken_back, unnamed = (manifest.meta.get(key) for key in (LENIENT, TAKEN_BACK, UNNAMED))
    if not isinstance(taken_back, list):
        taken_back = [name for name in stages if forgotten.get(name) != FORGET]
    return Meanings(
        {name: MIN if policies.get(name) == MIN else MAX for name in windows},
        frozenset(taken_back),
        frozenset(windows - set(lenient if isinstance(lenient, list) else ())),
        frozenset(stages if unnamed is None else unnamed),
    )


def recorded_aggregates(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """Returns, by stage and output, of which function its state is. Versions before did not say it."""
    return {stage: _mapping(functions) for stage, functions in _mapping(manifest.meta.get(AGGREGATES)).items()}


def recorded_times(manifest: Manifest) -> Mapping[str, Any]:
    """Returns, by stage, what `times_of` was. Versions before did not say it."""
    return _mapping(manifest.meta.get(BY_TIME))


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
    }
    unnamed = [s.name for s in flow.stages.values() if s.unnamed]
    return {key: value for key, value in said.items() if value} | {TAKEN_BACK: taken_back, UNNAMED: unnamed}


def _is_bounded(stage: BoundStage) -> bool:
    ttl = stage.options.ttl if isinstance(stage.options, UpdateOptions) else None
    return ttl is not None or (stage.window is not None and stage.window.keep_us is not None)
