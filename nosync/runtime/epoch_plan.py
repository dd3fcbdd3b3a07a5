"""Plans of the parts of an epoch: which segments and stages run, and what leaves them. Nothing starts here.

An epoch has a part for each round of a loop, and one for all the rest. `nosync.spark.epoch_frames` says how a plan runs
as a query of Spark, each part as one Spark job; `nosync.runtime.local_part` how it runs in this process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import WATERMARK, BoundStage, InputEdge, Segment, SegmentOutput, part_of
from nosync.flow.stage_options import JvmOptions
from nosync.lsm.facts.fencing import Instance
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import Digest
from nosync.operators.loops import Phase
from nosync.replication.client.location import StoreLocation
from nosync.runtime.edge_scan import EdgeScan, scanned_segments, with_their_sources
from nosync.runtime.scan import Scan, SourceFiles
from nosync.runtime.segment_task import Report, SegmentTask, edge_schema


@dataclass(frozen=True)
class EpochPlan:
    """Says what one run of an epoch is to do."""

    location: StoreLocation
    t: int
    shards: int
    histories: Mapping[str, History] = field(default_factory=dict)
    compute: Mapping[str, frozenset[int]] | None = None
    """The shards of each stage to compute; None: whatever is not recorded."""
    skip: frozenset[str] = frozenset()
    """Stages that need not be looked at: all of their layers are recorded."""
    timeline: str = "main"
    instance: Instance | None = None
    sealed: Mapping[tuple[str, int], Digest] = field(default_factory=dict)
    """The digests, by (stage, shard), that the manifest of the epoch lists, where it is sealed."""


Reports = dict[tuple[str, int], Report]
"""The reports of an epoch's tasks, by (stage, shard)."""


@dataclass(frozen=True)
class Part:
    """Is a part of an epoch: a round of a loop, or (without a loop) all the rest."""

    loop: str | None = None
    round: int | None = None
    phase: Phase | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)
    """The number of rounds that each loop took which is done."""


def for_tasks(stage: BoundStage) -> BoundStage:
    """Returns the stage without what only the driver can use: columns and DataFrames are handles on objects of the JVM."""
    if not isinstance(stage.options, JvmOptions):
        return stage
    return replace(stage, options=JvmOptions(stage.options.kept, step=stage.options.step))


class PartPlan:
    """Says what runs together: a part of one epoch, or all of several."""

    def __init__(
        self,
        flow: BoundFlow,
        plans: Sequence[EpochPlan],
        part: Part,
        given: Collection[str],
        files: Mapping[str, SourceFiles],
        *,
        most_readers: int = 0,
    ) -> None:
        """`given`: the sources whose rows are given. `files`: by source, those that tasks read themselves; `most_readers`: by so
        many tasks, where those behind the source read it, too.
        """
        self.flow, self.plans, self.part, self.given, self._files = flow, plans, part, given, files
        self.shards = plans[0].shards
        self._wanted_at = self._wanted_outputs()
        self._wanted = None if self._wanted_at is None else set[SegmentOutput]().union(*self._wanted_at)
        reads = bool(files) and self._wanted is None
        self._readers = scanned_segments(flow, files, self.shards, most_readers) if reads else frozenset[str]()
        """The segments behind sources whose tasks read these themselves."""
        if self._readers:
            self.flow = with_their_sources(flow, self._readers)

    @property
    def has_several(self) -> bool:
        """Says whether it runs several epochs."""
        return len(self.plans) > 1

    # --- segments ---------------------------------------------------------------------------------------------------

    def ends(self, done: frozenset[str]) -> list[Segment]:
        """Returns the segments that nothing leaves. The reports of the others travel with the rows that leave them.

        `done`: the stages that reported before.
        """
        segments = [s for s in self.flow.segments.values() if self._takes_part(s) and not self.outputs(s)]
        if self._wanted is not None:
            segments = [s for s in segments if self._has_work(s, self.plans)]
        if self.part.round is None:
            segments = [s for s in segments if not done.issuperset(self._run_of(s))]
        return [s for s in segments if self._run_of(s)]

    def _takes_part(self, segment: Segment) -> bool:
        return self.part.round is None or self.flow.loop_of(segment) == self.part.loop

    def _run_of(self, segment: Segment) -> tuple[str, ...]:
        """Returns the stages that a task of the segment runs: of a loop that is done those that are kept."""
        loop = self.flow.loop_of(segment)
        if loop is None or self.part.loop == loop:
            return segment.stages
        return tuple(name for name in segment.stages if not self.flow.stages[name].of_rounds)

    def is_scanned(self, segment: Segment) -> bool:
        """Returns whether a segment's tasks read its sources themselves, or those that its rows come from."""
        return segment.name in self._readers or any(name in self._files for name in segment.stages)

    def is_given(self, segment: Segment) -> bool:
        """Returns whether a segment's rows are those that the epoch is given."""
        return segment.fused or (not segment.edges and segment.name in self.given)

    def to_exchange(self) -> Segment | None:
        """Returns the segment whose rows can go to their shards by files, where that takes only one job more."""
        if self.has_several or self.flow.loops or self.plans[0].compute is not None:
            return None
        given = [s for s in self.flow.segments.values() if self.is_given(s)]
        return given[0] if len(given) == 1 and len(self.outputs(given[0])) <= 1 else None

    # --- what leaves them, and what comes in ------------------------------------------------------------------------

    def outputs(self, segment: Segment) -> list[SegmentOutput]:
        """Returns what leaves a segment."""
        found = self.flow.outputs(segment, self.part.loop)
        if self._readers:
            takers = [one for one in self.flow.segments.values() if one.name not in self._readers and not one.fused]
            sent = {edge.output for taker in takers for edge in taker.edges}
            return [output for output in found if output in sent]
        return found if self._wanted is None else [output for output in found if output in self._wanted]

    def _wanted_outputs(self) -> list[set[SegmentOutput]] | None:
        """Returns for each epoch the outputs that something is computed from, in a recovery or a replay.

        None: all are wanted; those of a loop go round.
        """
        if self.flow.loops or not (self.plans[0].skip or any(plan.compute is not None for plan in self.plans)):
            return None
        found = []
        for plan in self.plans:
            wanted = set[SegmentOutput]()
            for segment in reversed(self.flow.segments.values()):
                if self._has_work(segment, [plan]) or wanted.intersection(self.flow.outputs(segment)):
                    wanted.update(edge.output for edge in self._edges_for(segment, segment.stages, [plan]))
            found.append(wanted)
        return found

    def _has_work(self, segment: Segment, plans: Sequence[EpochPlan]) -> bool:
        return any(self.flow.stages[name].recorded and self._is_computed(name, plans) for name in segment.stages)

    def _is_computed(self, name: str, plans: Sequence[EpochPlan]) -> bool:
        """Returns whether a stage may be computed here, rather than read back; one that is not recorded always is."""
        if not self.flow.stages[name].recorded:
            return True
        may = any(plan.compute is None or name in plan.compute for plan in plans)
        return may and name not in plans[0].skip

    def _edges_for(self, segment: Segment, run: Sequence[str], plans: Sequence[EpochPlan]) -> list[InputEdge]:
        """Returns the edges whose rows something is computed from."""
        inputs = {i for name in run if self._is_computed(name, plans) for i in self.flow.stages[name].inputs}
        return [edge for edge in segment.edges if edge.input in inputs]

    def _edges(self, segment: Segment, run: Sequence[str]) -> list[InputEdge]:
        if self._wanted is not None:
            return self._edges_for(segment, run, self.plans)
        return [f for f in segment.edges if any(f.input in self.flow.stages[name].inputs for name in run)]

    def _comes_in_round(self, segment: Segment, edge: InputEdge) -> bool:
        assert self.part.round is not None, "only in a round"
        if self.flow.loops_back(segment, edge):
            return self.part.round > 0
        return self.part.round == 0 or self.flow.stages[edge.output.stage].loop == self.part.loop

    # --- tasks ------------------------------------------------------------------------------------------------------

    def tasks_of(self, segment: Segment, output: SegmentOutput | None) -> tuple[list[SegmentTask], frozenset[int]]:
        """Returns a segment's tasks, one for each epoch, and which of their edges bring nothing."""
        flow = self.flow
        loop = flow.loop_of(segment)
        inside = loop is not None and loop == self.part.loop
        run = self._run_of(segment)
        # The first to leave the segment computes all of it; the others what they need, which they find recorded.
        outputs = self.outputs(segment)
        if output is not None and outputs and output != outputs[0]:
            needed = flow.needed_for(segment, output.stage)
            run = tuple(name for name in run if name in needed)
        edges = self._edges(segment, run)
        if loop is not None and not inside:
            edges = []  # its rounds become the layers of the epoch
        absent = frozenset(i for i, f in enumerate(edges) if inside and not self._comes_in_round(segment, f))
        round = self.part.round if inside else None
        tasks = self._tasks(run, edges, output, round=round, absent=absent, head=segment.name)
        scan, edge_scans = None, None
        if segment.name in self._readers:
            schemas = [edge_schema(flow.stages, edge) for edge in edges]
            edge_scans = tuple(
                EdgeScan.of(flow, edge, schema, self._files) for edge, schema in zip(edges, schemas, strict=True)
            )
        elif self.is_scanned(segment):
            scan = Scan({source.name: self._files[source.name] for source in tasks[0].sources}, flow.key_groups)
        return [replace(task, fused=segment.fused, scan=scan, edge_scans=edge_scans) for task in tasks], absent

    def tasks_of_round_before(self, edge: InputEdge) -> list[SegmentTask]:
        """Returns the tasks that read back what a loop's body returned in the round before."""
        assert self.part.round, "the first round has none before it"
        stage = edge.output.stage
        return self._tasks((stage,), [], edge.output, round=self.part.round - 1, head=stage)

    def _tasks(
        self,
        run: tuple[str, ...],
        edges: list[InputEdge],
        output: SegmentOutput | None,
        *,
        round: int | None,
        absent: frozenset[int] = frozenset(),
        head: str,
    ) -> list[SegmentTask]:
        """Returns one task for each epoch."""
        flow = self.flow
        named = {*run, *(name for f in edges for name in (f.output.stage, *f.jvm))}
        named |= {part_of(name, WATERMARK) for name in run} & flow.stages.keys()
        plan = self.plans[0]
        first = SegmentTask(
            location=plan.location,
            t=plan.t,
            shards=plan.shards,
            stages={name: for_tasks(flow.stages[name]) for name in flow.stages if name in named},
            run=run,
            edges=tuple(edges),
            output=output,
            histories={name: plan.histories[name] for name in named if name in plan.histories},
            compute=_may_compute(plan, round),
            input_given=head in self.given,
            round=round,
            rounds=self.part.rounds.get(flow.stages[head].loop or "", 0),
            phase=self.part.phase.value if self.part.phase else "",
            absent=absent,
            recorded=plan.skip,
            timeline=plan.timeline,
            instance=plan.instance,
            sealed=plan.sealed,
        )
        emits = [self._wanted_at is None or output in self._wanted_at[i] for i in range(len(self.plans))]
        return [
            replace(
                first,
                t=plan.t,
                compute=_may_compute(plan, round),
                emits=output is None or emits[i],
                sealed=plan.sealed,
            )
            for i, plan in enumerate(self.plans)
        ]


def _may_compute(plan: EpochPlan, round: int | None) -> dict[str, frozenset[int]] | None:
    return None if plan.compute is None or round is not None else dict(plan.compute)
