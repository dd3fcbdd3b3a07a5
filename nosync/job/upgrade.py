"""An upgrade: the next epoch, and those after it, have other code. What is recorded stays what it is.

A store says by its manifests which code each stage had, so only the new code is needed. The upgrade is a branch at the
last epoch that is promoted at once: nothing is replayed. A stage whose code changed goes on from its recorded state, or
begins anew where its input changes; new stages begin with the next epoch. The line that was main stays as a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from nosync.flow.binder import Analyze
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import TIMED_UPDATE, declared_of
from nosync.flow.dataflow import Dataflow
from nosync.flow.kinds import UPDATE
from nosync.job.branch_checks import (
    UPGRADING,
    added_columns,
    changed_stages,
    check_branch_name,
    check_sources_are_there,
    difference,
    recorded_schema,
    returned_stages,
)
from nosync.job.delivery import check_columns, check_not_given, check_sinks
from nosync.job.flow_versions import FlowVersions
from nosync.job.meanings import recorded_states
from nosync.job.position import Position
from nosync.job.sinks import Sink
from nosync.lsm.errors import CompactedError, FlowError, HoleError, InvalidInputError, NosyncError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.manifests.branches import MAIN, SAME_CODE
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.model.layer import TraceId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.notebook import facts_html
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class UpgradePlan:
    """Says what an upgrade does. All but `at` and `keep_as` are names of stages, or of columns by source."""

    at: int
    """The last epoch with the code before."""
    keep_as: str | None
    """The branch that the line before stays as. None: none was asked for, and that line has no epoch of its own."""
    goes_on: tuple[str, ...]
    """Their code, or that of what they are computed from, changed: they go on from the state that is recorded."""
    begins_anew: tuple[str, ...]
    """They have what their code makes of all rows that are there, for their input changes."""
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    new_columns: Mapping[str, tuple[str, ...]]
    """Rows that are recorded have null in them."""
    taken_back: tuple[str, ...] = ()
    """An upgrade changed them, with which nothing ran. They have the code of before again."""

    @property
    def is_needed(self) -> bool:
        """Returns whether anything is another one than before."""
        return bool(self.goes_on or self.begins_anew or self.new or self.dropped or self.new_columns or self.taken_back)

    def facts(self) -> dict[str, str]:
        """Returns what is shown of it, by what it is."""
        columns = ", ".join(f"{source}.{name}" for source, names in self.new_columns.items() for name in names)
        names = {
            "goes on from its state": ", ".join(self.goes_on),
            "begins anew": ", ".join(self.begins_anew),
            "new": ", ".join(self.new),
            "dropped": ", ".join(self.dropped),
            "new columns": columns,
            "taken back": ", ".join(self.taken_back),
        }
        return {what: text for what, text in names.items() if text}

    def __str__(self) -> str:
        if not self.is_needed:
            return f"nothing to upgrade: the store's epoch {self.at} has this code"
        lines = [f"  {what:<24}{text}" for what, text in self.facts().items()]
        kept = "" if self.keep_as is None else f"; the line before stays as branch {self.keep_as}"
        return "\n".join([f"upgrade: epochs after {self.at} have the new code{kept}", *lines])

    def _repr_html_(self) -> str:
        return facts_html(
            f"upgrade after epoch {self.at}", {**self.facts(), "line before": self.keep_as or "has no epoch"}
        )


class Upgrade:
    """The upgrade of a store's main line to a flow."""

    def __init__(
        self,
        declared: Dataflow,
        store: Store,
        position: Position,
        parse_ddl: Callable[[str], pa.Schema],
        analyze: Analyze,
        keep_as: str | None = None,
        before: Dataflow | None = None,
        at: int | None = None,
        sinks: Mapping[str, Sink] | Collection[str] | None = None,
    ) -> None:
        """`sinks`: the stages that have one, or these with their sinks (default: those that had one).

        `before`: the code before, where that is there. `at`: a sealed epoch to fork at, for `branch_off`, in the place of
        the last one.

        Raises FlowError or SchemaError, naming the stage, where the flow cannot go on from what is recorded; UnknownStageError,
        FlowError or InvalidInputError for a sink that could not be given anything of the new code."""
        if position.branch != MAIN:
            raise FlowError(
                f"an upgrade is for {MAIN!r}; branch {position.branch!r} has other code by branch(replace=, add=, drop=)"
            )
        self._declared, self._before, self._sinks = declared, before, sinks
        self._store, self._position = store, position
        self._versions = FlowVersions(declared, store.node, position, parse_ddl, analyze, check=False)
        self._at = at
        self._stages = SAME_CODE
        self.plan: UpgradePlan | None = self._planned(keep_as)
        """What is to be done. None: there is no epoch yet, so any code will do."""

    def _planned(self, keep_as: str | None) -> UpgradePlan | None:
        last = self._position.last_sealed() if self._at is None else Epoch(self._at)
        manifest = None if last is None else self._position.manifest(last)
        if last is None or manifest is None:
            return None
        traces = {entry.id.trace.stage: entry.id.trace for entry in manifest.entries}
        recorded = {stage: trace.fingerprint for stage, trace in traces.items()}
        columns = self._new_columns(traces)
        # As on the timeline of the epoch: one that an upgrade made, and with which nothing ran, is as good as none.
        bound = self._versions.bound(self._declared, {name: recorded[name] for name in columns}, manifest.timeline)
        if isinstance(self._sinks, Mapping):
            check_sinks(self._sinks, self._declared)
            check_columns(self._sinks, bound)
        returned = returned_stages(bound, recorded, self._store.node.histories(MAIN), int(last))
        pinned = self._versions.as_recorded(self._declared, manifest, {stage.name for stage in bound.recorded})
        own = {declared_of(name) for name in changed_stages(pinned, recorded) if name in recorded}
        own |= self._changed_before_updates(pinned, recorded, manifest)
        known = _known(bound, recorded)
        found = difference(
            bound, self._declared, traces, self._store.directory, own, known, returned, recorded_states(manifest),
            replays=self._at is not None,
        )  # fmt: skip
        changed, anew = found.changed, found.anew
        if self._at is None:
            check_not_given(found.replaced, self._with_sinks(found.replaced))
        more = {source: names for source, names in columns.items() if names}
        self._stages = found.on_branch(more)
        timeline = self._store.node.timelines.timeline(MAIN)
        has_epochs = manifest.timeline == timeline.id
        waits = not has_epochs and self._at is None and timeline.at == last  # nothing ran since the upgrade before
        if waits and self._stages.is_of(timeline):
            return UpgradePlan(int(last), None, (), (), (), (), {})
        kept = keep_as or self._free_name(f"before-upgrade-{last}")
        plan = UpgradePlan(
            int(last),
            kept if has_epochs or keep_as else None,
            _declared_names(name for name in changed if name in recorded and name not in anew),
            _declared_names(anew),
            _declared_names(name for name in changed if name not in recorded and name not in anew),
            _declared_names(found.gone),
            more,
            _declared_names(name for name in timeline.changed if waits and name not in changed),
        )
        if plan.is_needed:  # a program may ask for the same upgrade at each start
            self._check_keep_as(keep_as)
        return plan

    def _check_keep_as(self, name: str | None) -> None:
        """Raises InvalidInputError for a name that the line before cannot have."""
        if name is None:
            return
        check_branch_name(name)
        if name in self._store.node.timelines.refs.names:
            raise InvalidInputError(f"branch {name!r} exists: keep the line before the upgrade under another name")

    def _with_sinks(self, stages: Collection[str]) -> Collection[str]:
        """Returns the stages that have a sink. Where no job says so, those of which one was told where it begins."""
        if self._sinks is not None:
            return self._sinks
        timelines, directory = self._store.node.timelines, self._store.directory
        here = timelines.timeline(MAIN).id, timelines.refs, directory.env
        return [stage for stage in stages if DeliveryLog(directory.root, stage, *here).first() is not None]

    def _changed_before_updates(self, pinned: BoundFlow, recorded: Mapping[str, str], manifest: Manifest) -> set[str]:
        """Returns the declared stages before changed updates that are not recorded and have other code, or may have.

        An update goes on from its state when its own function is another one, but not when what comes before it takes
        other rows. Its fingerprint does not say which of the two it is. The code before does. Where that is not there,
        an update that shares a stage with one whose fingerprint is the same is known to have the same code before it.
        """
        if self._before is not None and manifest.timeline == self._store.node.timelines.timeline(MAIN).id:
            before = self._versions.as_recorded(self._before, manifest, set(recorded)).stages
            same = {name for name, stage in before.items() if stage.fingerprint == _fingerprint(pinned, name)}
        else:
            kept = [name for name, fingerprint in recorded.items() if _fingerprint(pinned, name) == fingerprint]
            same = {up for name in kept for up in _unrecorded_before(pinned, name)}
        changed = [pinned.stages[name] for name in changed_stages(pinned, recorded) if name in recorded]
        updates = [stage.name for stage in changed if stage.kind in (UPDATE, TIMED_UPDATE)]
        return {declared_of(up) for name in updates for up in _unrecorded_before(pinned, name) if up not in same}

    def _new_columns(self, traces: Mapping[str, TraceId]) -> dict[str, tuple[str, ...]]:
        """Returns, for each source, the columns that it has more than it had. Raises SchemaError for those that went, or
        have another type.
        """
        found: dict[str, tuple[str, ...]] = {}
        for source in self._versions.flow.sources:
            name = source.name
            if name not in traces:
                continue  # it is new: the epochs before had no rows of it
            try:
                _, before = recorded_schema(traces[name], self._store.directory)
            except HoleError:
                if source.fingerprint != traces[name].fingerprint:
                    raise FlowError(
                        f"source {name}: its columns are not those that are recorded, or were added by an upgrade, and all of "
                        "its rows were released (at_safe_point), so nothing says which are new: run an epoch with the code as "
                        "it was, and upgrade right after it"
                    ) from None
                found[name] = ()
                continue
            found[name] = added_columns(name, before, source.schema)
        return found

    def _free_name(self, wanted: str) -> str:
        names = self._store.node.timelines.refs.names
        tries = [wanted, *(f"{wanted}-{n}" for n in range(2, len(names) + 3))]
        return next(name for name in tries if name not in names)

    def run(self) -> None:
        """Does it. The job that ran on the store until now publishes nothing more."""
        assert self.plan is not None, "there is an epoch"
        node = self._store.node
        self._position.take_over(node.timelines.timeline(MAIN).id)
        if UPGRADING in node.timelines.refs.names:
            node.delete_branch(UPGRADING)
        node.create_branch(UPGRADING, MAIN, self.plan.at, self._stages)
        try:
            node.promote(UPGRADING, self.plan.keep_as)
        except NosyncError:
            if UPGRADING in node.timelines.refs.names:
                node.delete_branch(UPGRADING)
            raise

    def branch_off(self, name: str) -> None:
        """Makes a branch with the new code, and leaves main as it is. The epochs after the fork are to be replayed there.

        The same call again changes nothing. Raises CompactedError where the epoch is below `since`, InvalidInputError for a
        name in use.
        """
        assert self.plan is not None, "there is an epoch"
        check_branch_name(name)
        at, timelines = self.plan.at, self._store.node.timelines
        if at < self._store.since():
            raise CompactedError(
                f"cannot branch at {at}: the history before {self._store.since()} was merged away. Keep more with retain=, or "
                "hold a point with pin()"
            )
        manifest = self._position.manifest(at)
        check_sources_are_there(
            self._versions.flow, at, {e.id.trace.stage for e in manifest.entries} if manifest else set()
        )
        known = timelines.timeline(name) if name in timelines.refs.names else None
        is_same = known is not None and (known.parent, known.at) == (timelines.timeline(MAIN).id, at)
        if known is None or not (is_same and self._stages.is_of(known)):
            self._store.node.create_branch(name, MAIN, at, self._stages)


def upgrade_of(
    flow: Dataflow, store: Store, spark: SparkSession, keep_as: str | None = None, at: int | None = None,
    sinks: Mapping[str, Sink] | Collection[str] | None = None,
) -> Upgrade:  # fmt: skip
    """Returns the upgrade of a store to a flow, where no job runs. The rest is as for `Upgrade`."""
    from nosync.spark.expressions import Analyzer  # noqa: PLC0415 - the store works without pyspark
    from nosync.spark.pickling import frozen  # noqa: PLC0415
    from nosync.spark.schemas import parse_ddl  # noqa: PLC0415
    from nosync.spark.session import expression_settings  # noqa: PLC0415

    analyze = Analyzer(spark, expression_settings(spark))
    return Upgrade(frozen(flow, spark), store, Position(store, MAIN), parse_ddl, analyze, keep_as, at=at, sinks=sinks)


def _fingerprint(flow: BoundFlow, name: str) -> str | None:
    return flow.stages[name].fingerprint if name in flow.stages else None


def _unrecorded_before(flow: BoundFlow, name: str) -> set[str]:
    """Returns the stages that are computed from recorded ones to be the input of a stage, and are not recorded."""
    inputs = [up for up in flow.stages[name].inputs if not flow.stages[up].recorded]
    return {*inputs, *(further for up in inputs for further in _unrecorded_before(flow, up))}


def _known(bound: BoundFlow, recorded: Mapping[str, str]) -> set[str]:
    """Returns the stages that were there: the recorded ones, and those that are not recorded, whose code what follows
    them has in its fingerprint.
    """
    return {name for name, stage in bound.stages.items() if name in recorded or not stage.recorded}


def _declared_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(declared_of, names)))
