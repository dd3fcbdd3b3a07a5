"""Branching off, promoting and rewinding: what changes on which timeline a job goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nosync.flow.dataflow import Dataflow
from nosync.job.branch_checks import (
    Difference,
    check_branch_name,
    check_same_sources,
    check_sources_are_there,
    difference,
    returned_stages,
)
from nosync.job.delivery import Delivery, check_not_given, check_sinks
from nosync.job.flow_versions import FlowVersions
from nosync.job.meanings import recorded_states
from nosync.job.position import Position
from nosync.job.sinks import Sink
from nosync.lsm.errors import CompactedError, FlowError, NosyncError
from nosync.lsm.manifests.branches import MAIN, not_as_far
from nosync.lsm.model.history import replaced_at
from nosync.lsm.model.timestamp import END_OF_TIME, last_of
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.lsm.store.store import Store


class Branching:
    """Changes the branches of the store that a job runs on."""

    def __init__(
        self,
        store: Store,
        position: Position,
        versions: FlowVersions,
        delivery: Delivery,
        sinks: Mapping[str, Sink],
    ) -> None:
        self._store, self._position, self._versions = store, position, versions
        self._delivery, self._sinks = delivery, sinks
        self._node, self._directory = store.node, store.directory

    def fork(
        self,
        name: str,
        t: int,
        replace: Mapping[str, Any] | None,
        add: Callable[[Dataflow], object] | None,
        drop: Sequence[str],
        declared: Dataflow | None = None,
        views: Collection[str] = (),
    ) -> Dataflow:
        """Makes a branch at a sealed epoch, unless the same call made it before. Returns its flow. `declared`: the job's
        flow with other queries of `views`.
        """
        check_branch_name(name)
        since = self._store.since()
        if t < since:
            raise CompactedError(
                f"cannot branch at {t}: the history before {since} was merged away. Keep more with retain=, or "
                "hold a point with pin()"
            )
        flow = (declared or self._versions.declared).changed(replace, add, drop)
        check_same_sources(self._versions.declared, flow)
        of_views = [stage for view in views if view in flow.views for stage in flow.views[view].stages]
        stages = self._what_differs(flow, t, {*(replace or {}), *drop, *of_views}).on_branch()
        refs = self._node.timelines.refs
        known = refs.timeline_of(name) if name in refs.names else None
        parent = self._node.timelines.timeline(self._position.branch).id
        wanted = (parent, t, tuple(sorted(stages.changed)), {*stages.replaced})
        # A version before let fewer stages begin anew, and its branches go on as they began.
        if (
            known is None
            or (known.parent, known.at, known.changed, {*known.replaced}) != wanted
            or not {*known.anew} <= {*stages.anew}
        ):
            self._node.create_branch(name, self._position.branch, t, stages)
        return flow

    def _what_differs(self, flow: Dataflow, t: int, touched: Collection[str]) -> Difference:
        """Returns how a flow differs from what is recorded at epoch `t`.

        `touched`: the stages that are replaced or dropped, and those of views that get a query. One that is dropped and added
        again under its name is replaced as well. Raises FlowError or SchemaError where the flow cannot go on from there.
        """
        manifest = self._position.manifest(t)
        assert manifest is not None, "it is sealed"
        traces = {e.id.trace.stage: e.id.trace for e in manifest.entries}
        now = self._versions.flow
        check_sources_are_there(now, t, traces)
        bound = self._versions.bound(flow, {stage.name: traces[stage.name].fingerprint for stage in now.sources})
        both = [name for name in touched if name in bound.stages and name in now.stages]
        own = [name for name in both if bound.stages[name].fingerprint != now.stages[name].fingerprint]
        known, histories = self._known_at(t, traces), self._node.histories(self._position.branch)
        returned = returned_stages(bound, traces, histories, t)
        was = recorded_states(manifest)
        return difference(bound, flow, traces, self._directory, own, known, returned, was, replays=True)

    def _known_at(self, t: int, recorded: Collection[str]) -> set[str]:
        """Returns the stages that were there at an epoch with the job's code.

        It is only right for what matters to stages that follow rows that change.
        """
        refs = self._node.timelines.refs
        steps = [refs.timelines[id] for id in refs.left(self._node.timelines.timeline(self._position.branch).id)]
        later = {name for step in steps if step.at is not None and step.at >= t for name in step.anew}
        stages = self._versions.flow.stages.items()
        return {name for name, stage in stages if name in recorded or not stage.recorded} - later

    def promote(self, other: Position, declared: Dataflow, keep_as: str | None) -> None:
        """Lets main be the timeline of another job's branch, whose flow is `declared`. Sinks are noted first."""
        if other.root != self._position.root:
            raise FlowError(f"branch {other.branch!r} is one of {other.root}, not of {self._position.root}")
        if self._position.branch != MAIN:
            raise FlowError(f"promote() belongs to the job on {MAIN!r}; this one is on {self._position.branch!r}")
        timelines = self._node.timelines
        at, before = timelines.timeline(other.branch).at, timelines.timeline(MAIN).id
        mine, theirs = self._position.last_sealed(), other.last_sealed()
        if theirs is None or mine is None or theirs < mine:
            raise FlowError(not_as_far(timelines.refs, other.branch, theirs, mine))
        check_sinks(self._sinks, declared)
        common = self._common(other, int(mine if at is None else min(mine, at)))
        histories = self._node.histories(other.branch)
        replaced = [s for s, spans in histories.items() if (replaced_at(spans, END_OF_TIME) or 0) > last_of(common)]
        check_not_given(replaced, self._sinks)
        pending = self._delivery.schedule_redelivery(other.branch, common)
        try:
            self._node.promote(other.branch, keep_as)
        except NosyncError:
            if timelines.timeline(MAIN).id == before:
                for marks, element in pending:
                    marks.take_back([element])
            raise

    def _common(self, other: Position, at: int) -> int:
        """Returns the last epoch up to `at` that both timelines share.

        It is before `at` where the branch is one of another branch, or main was rewound since.
        """
        while at > BEFORE_FIRST_EPOCH and _sealed_by(self._position, at) != _sealed_by(other, at):
            at -= 1
        return at

    def rewind(self, t: int, keep_as: str | None) -> str | None:
        """Lets main go on from an epoch. Returns the name of the branch that keeps what came after it."""
        if self._position.branch != MAIN:
            raise FlowError(
                f"rewind() belongs to the job on {MAIN!r}; branch {self._position.branch!r} can be branched off at {t} instead"
            )
        return self._store.rewind(t, keep_as)


def _sealed_by(position: Position, t: int) -> str | None:
    """Returns the timeline that an epoch was sealed on."""
    manifest = position.manifest(t)
    return None if manifest is None else manifest.timeline
