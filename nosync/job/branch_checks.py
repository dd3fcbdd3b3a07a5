"""Checks what a branch's flow may have: which stages change or begin anew, and whether they can. Pure.

A branch shares every layer of stages whose fingerprint is its parent's. What is missing are the layers of changed
stages and of what is computed from them; the recorded inputs give them again, and nothing else runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import (
    ARRANGE,
    FIRST,
    INTERVAL_JOIN,
    INTERVAL_SIDE,
    OUTPUT,
    SEEN,
    TIMED_UPDATE,
    BoundStage,
)
from nosync.flow.dataflow import Dataflow
from nosync.flow.kinds import FINAL, JOIN, PART_SEPARATOR, PER_KEY, SOURCE, UPDATE
from nosync.flow.tables import NewestRows
from nosync.job.meanings import RecordedStates
from nosync.job.operator_changes import (
    BY_CONTENTS,
    by_other_operators,
    by_other_times,
    changing_input,
    check_late_rows,
    of_other_shape,
    with_parts,
)
from nosync.lsm.columnar.columns import describe, nullable, unify_schemas
from nosync.lsm.errors import FlowError, InvalidInputError, NosyncError, SchemaError
from nosync.lsm.manifests.branches import ChangedStages
from nosync.lsm.manifests.manifest import DROP
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import TraceId, check_name
from nosync.lsm.model.timestamp import pack
from nosync.lsm.trace.directory import LayerDirectory

_BY_ARRIVAL = (SEEN, FIRST, INTERVAL_SIDE, INTERVAL_JOIN, TIMED_UPDATE, OUTPUT)
"""Kinds of stages by event time that forget, or give for good, as the watermark goes on."""

UPGRADING = "upgrade-in-progress"
"""The branch that an upgrade makes and promotes; one that is there was made by an upgrade that died."""


def check_branch_name(name: str) -> None:
    """Raises InvalidInputError for a name that no branch of a user has."""
    if check_name(name, "branch name") == UPGRADING:
        raise InvalidInputError(f"branch {name!r}: an upgrade has this name while it is made; give another one")


@dataclass(frozen=True)
class Difference:
    """How a flow differs from what a manifest has."""

    changed: list[str]
    """The recorded stages of the flow that the manifest has with another fingerprint, or not at all."""
    gone: list[str]
    """Stages of the manifest that are not in the flow, or that it does not record any more and that have other code."""
    anew: list[str]
    """Those of the changed stages that begin anew."""
    replaced: list[str]
    """Those of them with another key or other columns than are recorded, of which nothing before counts."""

    def on_branch(self, more: Iterable[str] = ()) -> ChangedStages:
        """Returns what the log of branches says of it. `more`: sources with other columns."""
        return ChangedStages((*self.changed, *self.gone, *more), tuple(self.anew), tuple(self.replaced))


def difference(
    flow: BoundFlow,
    declared: Dataflow,
    traces: Mapping[str, TraceId],
    directory: LayerDirectory,
    own: Collection[str],
    known: Collection[str],
    returned: Mapping[str, TraceId],
    was: RecordedStates,
    *,
    replays: bool,
) -> Difference:
    """Returns how a flow differs from what is recorded in `traces`, by stage. `own` and `known` are those of
    `stages_to_bootstrap`. `returned`: stages that were dropped and come back, with a trace that each had. `was`: what made
    the states that are recorded. `replays`: whether epochs that there are will be computed with the flow.

    Raises FlowError or SchemaError where it cannot go on from there.
    """
    recorded = {stage: trace.fingerprint for stage, trace in traces.items()}
    changed = changed_stages(flow, recorded)
    views = [view for view in declared.views.values() if not view.goes_on or view.name not in traces]
    of_views = {name for view in views for name in view.stages}
    _check_states_stay(flow, declared, traces, returned)
    if replays:
        check_late_rows(flow, changed)
    once = {name for view in declared.views.values() if view.emit == FINAL or view.goes_on for name in view.stages}
    shapes = {name: recorded_schema(traces[name], directory) for name in changed if name in traces}
    others = by_other_operators(flow, changed, shapes, was, of_views)
    rest = {name: shape for name, shape in shapes.items() if name not in others}
    reshaped = {*others, *of_other_shape(flow, rest, was), *by_other_times(flow, rest, was)}
    fed_together = with_parts(flow, reshaped, others)
    changed += [stage.name for stage in flow.recorded if stage.name in fed_together and stage.name not in changed]
    anew = stages_to_bootstrap(flow, changed, own, known, of_views, once, returned, fed_together)
    # One that was not recorded, and begins anew now, has another fingerprint then, and with it what follows.
    while following := [s.name for s in flow.recorded if s.name not in changed and flow.ancestors(s.name) & {*anew}]:
        changed += following
        anew = stages_to_bootstrap(flow, changed, own, known, of_views, once, returned, fed_together)
    _check_rows_are_kept(flow, anew, declared)
    replaced = _check_states_fit(flow, changed, anew, others, {**traces, **returned}, directory)
    gone = [
        name
        for name, fingerprint in recorded.items()
        if (stage := flow.stages.get(name)) is None or not (stage.recorded or stage.fingerprint == fingerprint)
    ]
    return Difference(changed, gone, anew, replaced)


def _check_states_stay(flow: BoundFlow, declared: Dataflow, traces: Collection[str], returned: Collection[str]) -> None:
    """Raises FlowError where a view goes on from what it gave, and an operator in it would begin with no state: a stage in a
    view is known by all that is before it, so with another filter, say, it is another one.
    """
    for view in declared.views.values():
        if not view.goes_on or view.name not in traces:
            continue
        inner = set(view.stages) - {view.name}
        new = [
            s for s in flow.recorded
            if _declared(s) in inner and s.name not in traces and s.name not in returned
            and (s.keyed or s.window is not None or s.kind in (*_BY_ARRIVAL, *BY_CONTENTS))
        ]  # fmt: skip
        if new:
            operator = _declared(new[0]).partition("-")[0]
            raise FlowError(
                f"stage {view.name} goes on from what it gave, and with this query its {operator} would begin with no state: "
                "rows that it has seen would count as new, and those that wait for others be lost. Leave what is before and in "
                f"the {operator} as it was (what comes after it may change), or give the dataset another name"
            )


def recorded_schema(trace: TraceId, directory: LayerDirectory) -> tuple[tuple[str, ...], pa.Schema]:
    """Returns the key and the columns that a stage recorded."""
    reader = directory.reader_of_any(trace)
    return reader.info.key, reader.schema


def added_columns(source: str, before: pa.Schema, now: pa.Schema) -> tuple[str, ...]:
    """Returns the columns that a source has more than are recorded. Raises SchemaError for those that went, that have another
    type, or that are in another order.
    """
    for field in before:
        if now.get_field_index(field.name) < 0:
            raise SchemaError(
                f"source {source}: column {field.name!r} is recorded and not declared any more: declare it, and leave it out of "
                "what follows"
            )
        if nullable(now.field(field.name).type) != nullable(field.type):
            raise SchemaError(
                f"source {source}: column {field.name!r} was {field.type} and is now {now.field(field.name).type}: declare "
                f"another column beside it ({describe(before)})"
            )
    if [name for name in now.names if before.get_field_index(name) >= 0] != before.names:
        raise SchemaError(
            f"source {source}: its columns are declared in another order than they are recorded in: keep "
            f"({', '.join(before.names)}) in this order; new ones may be anywhere"
        )
    return tuple(name for name in now.names if before.get_field_index(name) < 0)


def changed_stages(flow: BoundFlow, recorded: Mapping[str, str]) -> list[str]:
    """Returns the recorded stages of a flow that a manifest has with another fingerprint, or not at all."""
    return [stage.name for stage in flow.recorded if recorded.get(stage.name) != stage.fingerprint]


def returned_stages(
    flow: BoundFlow, recorded: Collection[str], histories: Mapping[str, History], t: int
) -> dict[str, TraceId]:
    """Returns the stages of a flow that epoch `t` does not have and an epoch before had, each with a trace that it had.
    `histories`: those of the branch that has the epoch.
    """
    before = {name: [span for span in spans if span.lower <= pack(t)] for name, spans in histories.items()}
    names = [stage.name for stage in flow.recorded if stage.name not in recorded]
    return {name: before[name][-1].trace(name, 0) for name in names if before.get(name)}


def _check_states_fit(
    flow: BoundFlow,
    changed: Iterable[str],
    anew: Collection[str],
    others: Collection[str],
    traces: Mapping[str, TraceId],
    directory: LayerDirectory,
) -> list[str]:
    """Checks that a changed keyed stage can read its parent's state, which it goes on from.

    A stage that begins `anew` takes back what it held before. Returns those that cannot, for they have another key or other
    columns, or are `others`, other operators than before, and cannot look up what was: they replace it. Raises SchemaError
    naming a stage that neither goes on nor can be made of all rows.
    """
    replaced: list[str] = []
    for name in changed:
        if name not in traces:
            continue  # it is new
        stage, (key, schema) = flow.stages[name], recorded_schema(traces[name], directory)
        if not (stage.keyed or key or name in anew):
            _check_columns_of_log(name, schema, stage.schema)
            continue
        try:
            if name in others and not (key and stage.keyed):
                raise SchemaError("another operator made it")
            if key != stage.key:
                raise SchemaError(f"its key was ({', '.join(key)}) and is now ({', '.join(stage.key)})")
            unify_schemas(schema, stage.schema, f"stage {name}")
        except NosyncError as error:
            if name in anew and stage.loop is None and not stage.given_once:
                replaced.append(name)
                continue
            raise SchemaError(
                f"stage {name} cannot go on from its parent's state ({describe(schema)}): {error}. Give the changed "
                "stage another name (drop= the old one, add= the new), so that it begins with no state"
            ) from error
    return replaced


def _check_columns_of_log(stage: str, before: pa.Schema, now: pa.Schema) -> None:
    """Raises SchemaError where rows that are recorded could not be read together with those to come."""
    for field in before:
        at = now.get_field_index(field.name)
        if at >= 0 and nullable(now.field(at).type) != nullable(field.type):
            raise SchemaError(
                f"stage {stage}: its column {field.name!r} was {field.type} and is now {now.field(at).type}: give the "
                "column another name, or the stage"
            )


def stages_to_bootstrap(
    flow: BoundFlow,
    changed: Collection[str],
    own: Collection[str],
    known: Collection[str],
    of_views: Collection[str] = (),
    once: Collection[str] = (),
    returned: Collection[str] = (),
    reshaped: Collection[str] = (),
) -> list[str]:
    """Returns the recorded stages that begin anew with a branch's first epoch, from all rows of their inputs that are
    there.

    Rows of an input that changes may be taken back after the fork though they came before it. So a stage with other
    code, or a new one, counts all that are there as its code sees them, and so does what follows it. `changed`: the
    recorded stages that do not share their layers with the parent; `own`: declared stages whose own code is another
    one; `known`: stages that were there at the fork, with the code that they have on the parent; `of_views`: what views are
    made of, which begins anew where it is new: a view is what its query gives of all rows; `once`: stages of views whose
    rows are given once; `returned`: stages that were there before, dropped, and come back: between are epochs that they
    have nothing of; `reshaped`: stages that have no use for what they hold, of other
    columns or functions. Raises FlowError naming a stage that cannot.
    """
    of_loop = {loop: {_declared(s) for s in flow.stages.values() if s.loop == loop} for loop in flow.loops}
    anew: set[str] = set()
    loops: set[str] = set()
    while True:
        for stage in flow.stages.values():
            recorded_as = stage.loop if stage.loop is not None and stage.of_rounds else stage.name
            if stage.recorded and recorded_as not in changed:
                continue
            if _is_given(stage, returned):
                continue
            declared = _declared(stage)
            # The sides of a stage that becomes a join under its name, or comes back as one, are as old as it is.
            is_side = stage.kind == ARRANGE and declared in known
            is_returned = stage.name in returned or (stage.kind == ARRANGE and declared in returned)
            is_new = (stage.loop or stage.name) not in known and not is_returned and not is_side
            # What is given once stays as it was given, and what follows it goes on.
            follows = stage.loop in loops or any(n in anew and not flow.stages[n].given_once for n in stage.inputs)
            has_other_code = is_new or not of_loop.get(stage.loop or "", {declared}).isdisjoint(own)
            begins = stage.name in reshaped or (
                has_other_code and (declared in of_views or _is_made_of_what_is_there(flow, stage, is_new=is_new))
            )
            if not (follows or begins or is_returned) or _goes_on(stage, known, anew=follows or stage.name in reshaped):
                continue
            if is_returned:
                _check_can_come_back(stage)
            if stage.recorded and not is_new:
                _check_can_begin_anew(stage, once)
            anew.add(stage.name)
        # The stages of a loop feed each other, so they begin together.
        of_loops = {stage.loop for stage in flow.stages.values() if stage.name in anew and stage.loop is not None}
        if of_loops <= loops:
            break
        loops |= of_loops
    recorded = [name for name, stage in flow.stages.items() if name in anew and stage.recorded]
    _check_all_or_nothing(flow, recorded)
    return recorded


def _check_can_begin_anew(stage: BoundStage, once: Collection[str]) -> None:
    """Raises FlowError where what a stage gave cannot be taken back, or what it holds cannot be made of all rows."""
    if _declared(stage) in once and not (stage.keyed or stage.changing or stage.given_once):
        raise FlowError(
            f'stage {_declared(stage)} cannot give other rows on a branch: its rows are given once (emit="final", a streaming '
            "table), and nothing can take back what it gave. Give the view another name there"
        )
    if stage.kind in _BY_ARRIVAL:
        raise FlowError(
            f"stage {_declared(stage)} cannot begin anew on a branch, as what it follows does there: what it holds depends on "
            "when rows came. Give it another name there (drop= the old one, add= the new), or run the changed flow in a store of "
            "its own, with backfill()"
        )


def _check_can_come_back(stage: BoundStage) -> None:
    """Raises FlowError for a stage by event time that was dropped: what is late depends on the epochs that it missed."""
    if stage.given_once or (stage.window is not None and stage.window.delay_us is not None):
        raise FlowError(
            f"stage {_declared(stage)} was there before and was dropped, and goes by a watermark, so it cannot come back over "
            "the same history: give it, or its view, another name; or promote the branch before the upgrade that dropped it"
        )


def _check_all_or_nothing(flow: BoundFlow, anew: Collection[str]) -> None:
    """Raises FlowError where of the stages that are fed together only some begin anew."""
    for segment in flow.segments.values():
        if any(len(flow.takes_whole(segment, edge, anew)) > 1 for edge in segment.edges):
            head = flow.stages[segment.name]
            why = "is joined with itself in another way: give the join another name (drop= the old one, add= the new)"
            if not head.recorded:
                why = "is not recorded (persist='none'), and of what takes its rows only a part begins anew: persist it"
            raise FlowError(
                f"stage {_declared(head)} cannot be fed on the branch what is there and what changed: it {why}"
            )


def _is_made_of_what_is_there(flow: BoundFlow, stage: BoundStage, *, is_new: bool) -> bool:
    """Returns whether a stage with other code must see all rows that are there: some may be taken back, or it makes its
    rows of all those of a key, as a join does, whose types keep other rows.
    """
    if stage.loop is not None:
        return not flow.loops[stage.loop].growing
    return (stage.kind in (PER_KEY, JOIN, ARRANGE) and not is_new) or changing_input(flow, stage) is not None


def _is_given(stage: BoundStage, returned: Collection[str]) -> bool:
    """Returns whether a stage has what the epochs were given, and nothing that another code would make of it. One that comes
    back has it again: to a source, and to a table, nothing was given in between.
    """
    is_table = isinstance(stage.function, NewestRows) and stage.name in returned and stage.inputs[0] in returned
    return stage.kind == SOURCE or is_table


def _goes_on(stage: BoundStage, known: Collection[str], *, anew: bool) -> bool:
    """Returns whether a stage that was there goes on from its state, though its input changes.

    An update's function sees what goes, and may do with it what it likes. `anew`: it has no use for its state, or what it
    follows begins anew.
    """
    return stage.kind == UPDATE and stage.name in known and not anew


def _declared(stage: BoundStage) -> str:
    """Returns the name of the stage that users named, of which it may be a part."""
    return stage.name.partition(PART_SEPARATOR)[0]


def _check_rows_are_kept(flow: BoundFlow, anew: Collection[str], declared: Dataflow) -> None:
    """Raises FlowError where a source releases rows that a stage which begins `anew` reads."""
    release = {source.name for source in declared.sources if source.at_safe_point == DROP}
    for stage in (flow.stages[name] for name in anew):
        for source in (up.name for name in stage.inputs for up in flow.changes_from(name) if up.name in release):
            raise FlowError(
                f"stage {_declared(stage)} begins anew on the branch, from all rows of source {source}, which "
                f"are released when they are safe (at_safe_point={DROP!r}): keep them, or run the changed flow in a store of "
                "its own, with backfill()"
            )


def check_sources_are_there(flow: BoundFlow, t: int, recorded: Collection[str]) -> None:
    """Raises FlowError where a source has no rows at an epoch that a branch would fork at: an upgrade added it later, or it
    is new. What is replayed are recorded inputs.
    """
    missing = next((stage.name for stage in flow.sources if stage.name not in recorded), None)
    if missing is not None:
        raise FlowError(
            f"cannot branch at {t}: source {missing} is not recorded there, and a branch replays recorded inputs. Branch at an "
            "epoch that has it"
        )


def check_same_sources(before: Dataflow, after: Dataflow) -> None:
    """Raises FlowError unless both flows have the same sources, for a branch replays the recorded inputs."""
    old = {stage.name: stage.schema for stage in before.sources}
    new = {stage.name: stage.schema for stage in after.sources}
    for name in sorted(old.keys() ^ new.keys()):
        raise FlowError(
            f"source {name} {'is dropped' if name in old else 'is new'}: a branch has the sources of its parent, whose "
            "recorded rows it replays"
        )
