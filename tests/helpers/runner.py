"""Runs dataflows without Spark: segment by segment and shard by shard, with the shuffling that Spark would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import nosync
from nosync.flow.binder import bind
from nosync.flow.bound_flow import BoundFlow, Loop
from nosync.flow.bound_stage import InputEdge, Segment, SegmentOutput
from nosync.flow.dataflow import Dataflow
from nosync.flow.ddl import columns_of
from nosync.flow.internal_columns import HASH64_COLUMN, REPORT_COLUMN, SIDE_COLUMN, TAG_COLUMN
from nosync.flow.meanings import Meanings
from nosync.job.branch_checks import changed_stages, returned_stages, stages_to_bootstrap
from nosync.job.meanings import meanings_to_record, recorded_meanings
from nosync.lsm.columnar.hashing import hash64
from nosync.lsm.manifests.branches import MAIN, ChangedStages
from nosync.lsm.manifests.manifest import SUMS
from nosync.lsm.model.history import Span, continued, views_of
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import end_of, last_of, pack
from nosync.operators.loops import first_phase, next_phase
from nosync.replication.client.location import StoreLocation, open_directory
from nosync.runtime.segment_task import (
    TAG_SHARD_BITS,
    Report,
    SegmentTask,
    emitted_schema,
    side_column,
)
from nosync.runtime.shard_run import run_shard

SHARDS = 2


def parse_ddl(text: str) -> pa.Schema:
    """Returns the columns of a text as Spark does. `interval` is a duration: Spark's own kind cannot be recorded."""
    columns = columns_of(text, "a test's schema")
    types = {name: pa.duration("us") if type_ is None else type_ for name, type_ in columns.items()}
    return pa.schema(list(types.items()))


def meanings_before(flow: Dataflow) -> Meanings:
    """What a flow meant in versions that recorded nothing of expiry, of what is late, of names, and of the sides of joins."""
    names = frozenset(stage.name for stage in flow.stages)
    return Meanings(taken_back=names, strict=names, unnamed=names, late_by_side=names)


class Runner:
    """Runs a flow's segments shard by shard without Spark, shuffling rows as Spark may."""

    def __init__(self, flow: Dataflow, root: Path, seed: int, shards: int = SHARDS) -> None:
        (root / "tmp").mkdir(parents=True, exist_ok=True)
        self.flow: BoundFlow = bind(flow, parse_ddl)
        self.root = root
        self.random = np.random.default_rng(seed)
        self.shards = shards
        self.spans: dict[str, list[Span]] = {}
        self.round: int | None = None
        self.rounds, self.phase = 0, ""
        self.counts: list[int] = []
        self.reports: list[Report] = []

    def advance(self, t: int, rows: pa.Table | dict[str, pa.Table]) -> None:
        given = rows if isinstance(rows, dict) else {self.flow.sources[0].name: rows}
        self._begin_spans(t)
        of_other_epochs, self.flow = self.flow, self.flow.at_epoch(t)
        try:
            self._run(t, given)
        finally:
            self.flow = of_other_epochs

    def _run(self, t: int, given: dict[str, pa.Table]) -> None:
        for loop in self.flow.loops.values():
            self._loop(t, loop, given)
        for segment in self.flow.segments.values():
            if not self.flow.outputs(segment):
                self._segment(t, segment, given, None)

    def _begin_spans(self, t: int) -> None:
        for stage in self.flow.recorded:
            spans = self.spans.setdefault(stage.name, [])
            if not spans or spans[-1].shard_count != self.shards:
                if spans:
                    spans[-1] = replace(spans[-1], upper=pack(t))
                spans.append(Span(stage.fingerprint, self.shards, pack(t)))

    def _loop(self, t: int, loop: Loop, given: dict[str, pa.Table]) -> None:
        """All rounds; the numbers of changes are kept for tests to look at."""
        self.counts = []
        phase = first_phase(growing=loop.growing)
        while phase is not None:
            self.round, self.phase = len(self.counts), phase.value
            self.reports = []
            for segment in self.flow.segments.values():
                if self.flow.loop_of(segment) == loop.name:
                    self._segment(t, segment, given, None)
            changed = {r.shard: r.changes for r in self.reports if r.stage == loop.name}
            self.counts.append(sum(changed.values()))
            phase = next_phase(phase, self.round, self.counts[-1])
            assert self.round < loop.max_rounds
        self.round, self.phase, self.rounds = None, "", len(self.counts)

    def _segment(
        self,
        t: int,
        segment: Segment,
        given: dict[str, pa.Table],
        output: SegmentOutput | None,
        *,
        replay: bool = False,
    ) -> list[pa.RecordBatch]:
        loop = self.flow.loop_of(segment)
        inside = self.round is not None and loop is not None
        edges = list(enumerate(segment.edges)) if inside or loop is None else []
        if replay:
            edges = []
        present = [i for i, edge in edges if not inside or self._comes(segment, edge)]
        task = self.task(t, segment, output)
        if inside:
            absent = frozenset(i for i, _ in edges if i not in present)
            task = replace(task, absent=absent, round=self.round - replay, phase=self.phase)
        if loop is not None and not inside:
            run = tuple(name for name in segment.stages if not self.flow.stages[name].of_rounds)
            task = replace(task, run=run, edges=(), rounds=self.rounds)
        if replay:
            task = replace(task, run=(output.stage,), edges=())
        parts: list[pa.Table | None] = [None] * self.shards
        if present:
            fed = [self._edge_rows(t, i, segment, given, several=len(present) > 1) for i in present]
            parts = [pa.concat_tables([f[i] for f in fed], promote_options="default") for i in range(self.shards)]
        elif not segment.edges and segment.name not in given:
            task = replace(task, input_given=False)  # what the source recorded is read back
        elif not segment.edges:
            rows = given[segment.name]
            placed = self._by_shard(self._hashed(rows, self.flow.stages[segment.name].placed_by or rows.column_names))
            parts = [self._hashed(part.drop_columns([HASH64_COLUMN]), rows.column_names) for part in placed]
        found = []
        for i, part in enumerate(parts):
            found += list(run_shard(task, i, iter(part.to_batches() if part is not None else [])))
        if output is None and inside:
            self.reports += [Report.from_json(r) for b in found for r in b.column(0).to_pylist()]
        return found

    def _comes(self, segment: Segment, edge: InputEdge) -> bool:
        if self.flow.loops_back(segment, edge):
            return self.round > 0
        return self.round == 0 or self.flow.stages[edge.output.stage].loop is not None

    def task(self, t: int, segment: Segment, output: SegmentOutput | None) -> SegmentTask:
        return SegmentTask(
            location=StoreLocation(str(self.root), 128),
            t=t,
            shards=self.shards,
            stages=self.flow.stages,
            run=segment.stages,
            edges=segment.edges,
            output=output,
            histories={name: tuple(spans) for name, spans in self.spans.items()},
        )

    def sent(self, t: int, edge: InputEdge, given: dict[str, pa.Table], *, replay: bool = False) -> pa.Table:
        source = self.flow.stages[edge.output.stage]
        home = self.flow.segment_of(source.name)
        round = self.round
        if self.flow.loop_of(home) is None:
            self.round = None  # what enters the loop is of the epoch
        batches = self._segment(t, home, given, edge.output, replay=replay)
        self.round = round
        return pa.Table.from_batches(batches, schema=emitted_schema(source, edge.output))

    def _edge_rows(
        self, t: int, index: int, segment: Segment, given: dict[str, pa.Table], *, several: bool
    ) -> list[pa.Table]:
        """An edge's rows by shard, reports and marks included."""
        edge = segment.edges[index]
        sent = self.sent(t, edge, given, replay=self.flow.loops_back(segment, edge))
        sent = sent.take(pa.array(self.random.permutation(sent.num_rows)))
        data = sent.filter(sent[REPORT_COLUMN].is_null())
        reports = sent.filter(sent[REPORT_COLUMN].is_valid())
        targets = reports[TAG_COLUMN].to_numpy()
        reports = reports.append_column(HASH64_COLUMN, pa.nulls(reports.num_rows, pa.int64()))
        if edge.key:
            parts = self._by_shard(self._hashed(data, edge.key))
        else:
            home = data[TAG_COLUMN].to_numpy() >> TAG_SHARD_BITS
            data = data.append_column(HASH64_COLUMN, pa.nulls(data.num_rows, pa.int64()))
            parts = [data.filter(pa.array(home == i)) for i in range(self.shards)]
        parts = [pa.concat_tables([part, reports.filter(pa.array(targets == i))]) for i, part in enumerate(parts)]
        if not several:
            return parts
        kept = (TAG_COLUMN, REPORT_COLUMN, HASH64_COLUMN)
        names = [n if n in kept else side_column(index, n) for n in parts[0].column_names]
        sides = [pa.repeat(pa.scalar(index, pa.int32()), part.num_rows) for part in parts]
        return [p.rename_columns(names).append_column(SIDE_COLUMN, s) for p, s in zip(parts, sides, strict=True)]

    def _hashed(self, rows: pa.Table, key: Any) -> pa.Table:
        hashes = hash64([rows.column(name).combine_chunks() for name in key])  # as the JVM
        return rows.append_column(HASH64_COLUMN, pa.array(hashes.view(np.int64)))

    def _by_shard(self, rows: pa.Table) -> list[pa.Table]:
        hashes = rows[HASH64_COLUMN].to_numpy().view(np.uint64)
        groups = (hashes >> np.uint64(32)) * np.uint64(128) >> np.uint64(32)
        shards = groups * np.uint64(self.shards) // np.uint64(128)
        rows = rows.take(pa.array(order := self.random.permutation(rows.num_rows)))
        return [rows.filter(pa.array(shards[order] == i)) for i in range(self.shards)]

    def read(self, name: str, t: int) -> pa.Table:
        stage, directory = self.flow.stages[name], open_directory(StoreLocation(str(self.root), 128))
        tables = []
        for view in views_of(tuple(self.spans[name]), name, pack(t), 128, log=not stage.keyed):
            trace = directory.open_view(view, until=end_of(t), as_of=last_of(t))
            batches = trace.scan(last_of(t))
            tables.append(pa.Table.from_batches(batches, schema=trace.schema).select(stage.output.names))
        return pa.concat_tables(tables)


class StoreRunner(Runner):
    """Runs a flow on a branch of a store, and seals its epochs as a job does."""

    def __init__(
        self,
        flow: Dataflow,
        store: nosync.Store,
        seed: int,
        branch: str = MAIN,
        shards: int = SHARDS,
        meanings: Meanings | None = None,
    ) -> None:
        """`meanings`: what the flow means where it does not say it; None: as the store says."""
        super().__init__(flow, store.directory.root, seed, shards)
        self.store, self.branch, self.declared = store, branch, flow
        self._given = meanings
        self.flow = bind(flow, parse_ddl, meanings=self._meanings())
        if branch != MAIN:
            self.flow = self._bound(flow, self._recorded_sources())

    def _bound(self, flow: Dataflow, sources: dict[str, str]) -> BoundFlow:
        refs = self.store.node.timelines.refs
        line = refs.timeline_of(self.branch).id
        return bind(
            flow, parse_ddl, sources=sources, begins=refs.begins(line), bootstrap_at=refs.anew(line),
            meanings=self._meanings(),
        )  # fmt: skip

    def _meanings(self) -> Meanings:
        if self._given is not None:
            return self._given
        last = self.store.last_sealed(self.branch)
        return recorded_meanings(None if last is None else self.store.manifest(last, self.branch))

    def _recorded_sources(self) -> dict[str, str]:
        manifest = next(iter(self.store.node.timelines.manifests(self.branch).values()))
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries}
        return {stage.name: recorded[stage.name] for stage in self.flow.sources}

    def _begin_spans(self, t: int) -> None:
        node = self.store.node
        histories, timeline = node.histories(self.branch), node.timelines.timeline(self.branch)
        if timeline.replaced and timeline.at is not None and pack(t) == end_of(timeline.at):
            for s in self.flow.recorded:
                history, replaces = histories.get(s.name, ()), s.name in timeline.replaced
                histories[s.name] = continued(history, s.fingerprint, self.shards, pack(t), replaces=replaces)
        self.spans = {name: list(history) for name, history in histories.items()}

    def advance(self, t: int, rows: pa.Table | dict[str, pa.Table]) -> None:
        super().advance(t, rows)
        ids = [
            LayerId(TraceId(stage.name, stage.fingerprint, Shard(i, self.shards)), Description.of_epoch(t))
            for stage in self.flow.recorded
            for i in range(self.shards)
        ]
        sums = {name: list(columns) for name, columns in self.flow.sums.items()}
        meta = {SUMS: sums, **meanings_to_record(self.flow)}
        self.store.node.seal(t, ids, self.branch, meta=meta)

    def replay(self, t: int) -> None:
        """An epoch of a branch, from the inputs that its parent recorded."""
        self.advance(t, {})

    def make_branch(
        self, name: str, at: int, flow: Dataflow, own: Sequence[str] = (), of_views: Sequence[str] = ()
    ) -> StoreRunner:
        """As Job.branch does. `own`: stages that have other code; `of_views`: those that are made of views' queries."""
        manifest = self.store.node.timelines.manifest(at, self.branch)
        recorded = {e.id.trace.stage: e.id.trace.fingerprint for e in manifest.entries}
        sources = {stage.name: recorded[stage.name] for stage in self.flow.sources}
        bound = self._bound(flow, sources)
        other = [n for n in own if n not in recorded or bound.stages[n].fingerprint != self.flow.stages[n].fingerprint]
        changed = changed_stages(bound, recorded)
        returned = returned_stages(bound, recorded, self.store.node.histories(self.branch), at)
        anew = stages_to_bootstrap(bound, changed, other, self.flow.stages, of_views, (), returned)
        self.store.node.timelines.create(name, self.branch, at, ChangedStages(tuple(changed), tuple(anew)))
        return StoreRunner(flow, self.store, 0, name, self.shards)
