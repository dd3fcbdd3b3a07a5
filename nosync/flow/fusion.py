"""Fusing: fewer tasks for the same stages, and what expressions do on the way between them. Pure.

What expressions make of a source's rows can be sent to the task of a keyed stage together with the rows themselves,
where both are in the shards of the same key. Then one task records the source and computes the keyed stage, and rows
are shuffled once. The next keyed stage joins that task too, if its rows are in those shards. Recorded inputs, which the
JVM does not see before a task has read them, take the longer way.
"""

from __future__ import annotations

import graphlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nosync.flow.bound_stage import BoundStage, InputEdge, Segment
from nosync.flow.kinds import SELECT, SOURCE, WHERE
from nosync.flow.stage_options import ExpressionOptions, JvmOptions

_SUBQUERY = re.compile(r"\bselect\b", re.IGNORECASE)


# --- segments ---------------------------------------------------------------------------------------------------------


def placed_stages(stages: Mapping[str, BoundStage], segments: Mapping[str, Segment]) -> dict[str, BoundStage]:
    """Returns the stages, where a source goes by the key of a stage behind expressions if that lets the two be fused.

    A source whose rows a stage takes by key as they are keeps its place.
    """
    placed = dict(stages)
    for taker in segments.values():
        from_sources = [edge for edge in taker.edges if not _stays_in_shard(stages, edge)]
        keys = {edge.output.stage: _key_at_source(stages, edge) for edge in from_sources}
        if keys and all(key and placed[name].placed_by in ((), key) for name, key in keys.items()):
            candidate = placed | {name: replace(placed[name], placed_by=key) for name, key in keys.items()}
            fused = fused_segments(candidate, segments).values()
            if any(segment.fused and taker.name in segment.stages for segment in fused):
                placed = candidate
    return placed


def fused_segments(stages: Mapping[str, BoundStage], segments: Mapping[str, Segment]) -> dict[str, Segment]:
    """Returns the segments of a flow without loops, where those that can run in one task are one."""
    eager = _fused(stages, segments, eager=True)
    # A segment runs once for each of its exits.
    if all(_exits([segment], eager) <= 1 for segment in eager.values() if segment.fused):
        return eager
    return _fused(stages, segments, eager=False)


def _fused(stages: Mapping[str, BoundStage], segments: Mapping[str, Segment], *, eager: bool) -> dict[str, Segment]:
    """`eager` allows segments of several exits, on the chance that what takes those rows becomes part of them."""
    fused = dict(segments)
    for taker in segments.values():
        homes = _homes_of(taker, stages, fused)
        if homes and (eager or _exits([*homes, taker], fused) <= 1):
            for segment in (*homes, taker):
                del fused[segment.name]
            members = tuple(name for home in homes for name in home.stages) + taker.stages
            brought = (edge for home in homes for edge in home.edges)
            edges = (*brought, *(edge for edge in taker.edges if not _stays_in_shard(stages, edge)))
            fused[homes[0].name] = Segment(homes[0].name, members, edges, fused=True)
    return _in_order(fused)


def _homes_of(taker: Segment, stages: Mapping[str, BoundStage], segments: Mapping[str, Segment]) -> list[Segment]:
    """Returns the segments that alone feed a segment, if it can be one with them: those of sources, and fused ones."""
    if any(edge.output.whole for edge in taker.edges):
        return []  # what is there is not among the rows that are given
    homes: dict[str, Segment] = {}
    expressed = set[str]()
    for edge in taker.edges:
        name = edge.output.stage
        home = next(segment for segment in segments.values() if name in segment.stages)
        if home.edges and not home.fused:
            return []
        if not _stays_in_shard(stages, edge):
            key = _key_at_source(stages, edge)
            # What expressions make of a source's rows is sent for one edge only.
            if not key or key != stages[name].placed_by or name in expressed:
                return []
            expressed.add(name)
        homes[home.name] = home
    if expressed.intersection(edge.output.stage for home in homes.values() for edge in home.edges):
        return []
    return list(homes.values())


def _exits(together: Sequence[Segment], segments: Mapping[str, Segment]) -> int:
    """Returns how many outputs others would take from these segments, were they one."""
    inside = {name for segment in together for name in segment.stages}
    others = [s for s in segments.values() if s not in together and not s.fused]
    return len({edge.output for s in others for edge in s.edges if edge.output.stage in inside})


def _stays_in_shard(stages: Mapping[str, BoundStage], edge: InputEdge) -> bool:
    """Returns whether the rows of a keyed edge are in the shards of its key already, and no expression comes in
    between.
    """
    home = stages[edge.output.stage]
    return not edge.jvm and edge.output.window is None and bool(edge.key) and home.placed_by == edge.key


def _key_at_source(stages: Mapping[str, BoundStage], edge: InputEdge) -> tuple[str, ...]:
    """Returns the key of an edge in terms of its source (see `BoundStage.placed_by`), if expressions that can be put
    together as one text pass it on. Else it is empty.
    """
    if stages[edge.output.stage].kind != SOURCE or edge.output.window is not None:
        return ()
    if not all(_is_text(stages[name]) for name in edge.jvm):
        return ()
    kept = kept_through(stages, edge)
    if kept.keys() >= {*edge.key}:
        return tuple(kept[column] for column in edge.key)
    computed = _computed_through(stages, edge)
    if not {*kept, *computed} >= {*edge.key}:
        return ()
    conditions = conditions_of(stages, edge)
    key = (kept[column] if column in kept else f"={computed[column]}" for column in edge.key)
    return (*key, f"?{all_hold(conditions)}") if conditions else tuple(key)


def _in_order(segments: Mapping[str, Segment]) -> dict[str, Segment]:
    """Returns the segments, each after those that feed it."""
    home_of = {name: segment.name for segment in segments.values() for name in segment.stages}
    before = {
        s.name: [home_of[f.output.stage] for f in s.edges if home_of[f.output.stage] != s.name]
        for s in segments.values()
    }
    return {name: segments[name] for name in graphlib.TopologicalSorter(before).static_order()}


# --- expressions on the way along an edge -----------------------------------------------------------------------------


def _is_text(stage: BoundStage) -> bool:
    """Returns whether a stage's expressions can be a part of one SQL text: it is no join with a table, and has no
    Column objects and no subqueries.
    """
    texts = stage.options.texts if isinstance(stage.options, ExpressionOptions) else None
    return texts is not None and not any(map(_SUBQUERY.search, texts))


def kept_through(stages: Mapping[str, BoundStage], edge: InputEdge) -> dict[str, str]:
    """Returns the columns of an edge that no expression made, each with the column of the edge's first stage that it
    is.
    """
    names = {name: name for name in stages[edge.output.stage].output.names}
    for stage in edge.jvm:
        kept = stages[stage].options_as(JvmOptions).kept
        names = {name: names[of] for name, of in kept.items() if of in names}
    return names


def _computed_through(stages: Mapping[str, BoundStage], edge: InputEdge) -> dict[str, str]:
    """Returns the columns of an edge that one expression over the columns of its source makes, each with that
    expression.

    There are none where a condition comes after it: the expression might fail on rows of which, the longer way, Spark
    would ask the condition first.
    """
    *before, last = (stages[name] for name in edge.jvm)
    if last.kind != SELECT or any(stage.kind == SELECT or not stage.options_as(JvmOptions).plain for stage in before):
        return {}
    return dict(last.options_as(JvmOptions).computed)


def conditions_of(stages: Mapping[str, BoundStage], edge: InputEdge) -> list[str] | None:
    """Returns the conditions that an edge's rows fulfil, over columns of the source. None where one is over columns
    that a select returns.
    """
    of_jvm = [stages[name] for name in edge.jvm]
    at_source = list(itertools.takewhile(lambda stage: stage.kind == WHERE, of_jvm))
    if any(stage.kind == WHERE for stage in of_jvm[len(at_source) :]):
        return None
    return [stage.options_as(ExpressionOptions).expressions[0] for stage in at_source]


def all_hold(conditions: Sequence[str]) -> str:
    """Returns an SQL text that is true where all conditions are.

    A later condition is not asked of rows that an earlier one does not let pass: it may fail on them.
    """
    if not conditions:
        return "TRUE"
    first = f"coalesce(({conditions[0]}\n), FALSE)"
    return f"IF({first}, {all_hold(conditions[1:])}, FALSE)" if len(conditions) > 1 else first
