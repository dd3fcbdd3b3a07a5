"""The way back through a flow, stage by stage, from rows of a stage to the rows of the sources that led to them.

Steps
1. The changes of the key up to the epoch are the rows that are wanted of the stage itself.
2. Stages in reverse order: from the rows that are wanted of a stage follow those that are wanted of its inputs. A keyed
   stage wants its key's rows up to the epoch; a filter or union the same rows; a function is applied again to the
   recorded rows, and those that its wanted rows came from are told apart by a tag, by position, or by halving.
3. What is wanted of the sources is the answer.

A step that can only say "some of these" says so: it is not exact. That is also so at epochs that other code computed, as
before an upgrade: what is not recorded of them is not computed again with today's code. (Why-provenance: Buneman, Khanna,
Tan, Why and Where, ICDT 2001; lineage by replay: Ikeda, Park, Widom, CIDR 2011.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import (
    ARRANGE,
    FIRST,
    INTERVAL_JOIN,
    INTERVAL_SIDE,
    LATE,
    OUTPUT,
    SEEN,
    TIMED_UPDATE,
    BoundStage,
    Evaluate,
    part_of,
)
from nosync.flow.kinds import FILTER, IN_JVM, JOIN, LOOP, MAP, PER_KEY, UNION
from nosync.flow.stage_options import FinalOptions
from nosync.job.other_code import Manifests, epochs_of_other_code
from nosync.kernels.windows import END, START, with_windows
from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    Bools,
    Indices,
    as_array,
    comparable,
    with_columns_of,
)
from nosync.lsm.errors import CompactedError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.trace.change_feed import INSERT
from nosync.operators.base import as_changes, call, conform

TAG = "_row"
_BY_SHARED_COLUMNS = frozenset({JOIN, INTERVAL_JOIN, INTERVAL_SIDE, FIRST, SEEN})
"""The kinds of stages whose rows come of the input's rows that have the same values in the columns of both."""
_MOST_CALLS = 512
"""How often a function is called to find the rows that one shard's wanted rows of one epoch came from."""


class Recorded(Manifests, Protocol):
    """A store, where recorded rows come from."""

    def read(self, stage: str, as_of: int | None = None, *, branch: str = MAIN) -> pa.Table:
        """Returns the state of a stage as of an epoch."""

    def changes(self, stage: str, after: int, until: int, *, shard: int | None = None, branch: str = MAIN) -> pa.Table:
        """Returns the change feed of a stage."""

    def shards(self, stage: str, t: int, *, branch: str = MAIN) -> list[int]:
        """Returns the numbers of the shards that a stage has at an epoch."""

    def first_sealed(self, branch: str = MAIN) -> int | None:
        """Returns the oldest epoch that was sealed."""

    def last_sealed(self, branch: str = MAIN) -> int | None:
        """Returns the newest epoch that was sealed."""

    def since(self) -> int:
        """Returns the oldest epoch whose state is sure to be readable."""

    def replaced_from(self, stage: str, branch: str = MAIN) -> int | None:
        """Returns the epoch at which a stage began anew with another key or other columns."""


@dataclass(frozen=True)
class Lineage:
    """The rows of one stage that led to the value: its columns and `_epoch`, in order of epoch."""

    stage: str
    kind: str
    rows: pa.Table
    exact: bool = True
    notes: tuple[str, ...] = ()


@dataclass
class _Wanted:
    """The rows that are wanted of a stage, by epoch and shard."""

    rows: dict[tuple[int, int], tuple[pa.Table, Bools]] = field(default_factory=dict)
    exact: bool = True
    notes: list[str] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    """Epochs of which it is not known what its rows were: other code made them, and they are not recorded."""

    def add(self, t: int, shard: Shard, fed: pa.Table, mask: Bools) -> None:
        """Adds rows to what is wanted. Two ways may lead to the same one."""
        if mask.any():
            at = (t, shard.index)
            self.rows[at] = fed, mask | self.rows[at][1] if at in self.rows else mask

    def table(self, schema: pa.Schema) -> pa.Table:
        found = [_at(fed.select(schema.names).filter(pa.array(m)), t) for (t, _), (fed, m) in self._ordered()]
        return pa.concat_tables(
            [pa.schema([*schema, pa.field(EPOCH_COLUMN, pa.int64())]).empty_table(), *found],
            promote_options="permissive",
        )

    def _ordered(self) -> list[tuple[tuple[int, int], tuple[pa.Table, Bools]]]:
        return [(at, self.rows[at]) for at in sorted(self.rows)]


class Walk:
    """Goes back from wanted rows of a stage to those of the sources."""

    def __init__(
        self, flow: BoundFlow, recorded: Recorded, branch: str, first: int, t: int, evaluate: Evaluate
    ) -> None:
        self._flow, self._recorded, self._branch = flow, recorded, branch
        self._first, self._t, self._evaluate = first, t, evaluate
        self._wanted: dict[str, _Wanted] = {}
        self._other: Mapping[str, set[int]] = {}

    # --- step 2 -----------------------------------------------------------------------------------------------------

    def back_from(
        self, start: BoundStage, key: pa.Table, progress: Callable[[int, int], None] | None
    ) -> tuple[Lineage, ...]:
        stages = self._leading_to(start)
        epochs = range(self._first, self._t + 1)
        self._other = epochs_of_other_code(stages, self._inputs, self._recorded, self._branch, epochs)
        mine = self._of(start.name)
        for t, shard, rows in self._edges(start.name):
            mine.add(t, shard, rows, matching(rows, key, [n for n in key.column_names if n in rows.column_names])[0])
        steps = []
        for done, stage in enumerate(stages):
            if stage.kind == ARRANGE or stage.name not in self._wanted:
                continue
            wanted = self._wanted.pop(stage.name)
            rows = wanted.table(stage.output)
            for name in dict.fromkeys(self._inputs(stage)):
                self._input(stage, name, self._of_this_code(stage, name, rows))
                if wanted.unknown:
                    self._all(stage, name, wanted.unknown)
            is_exact = wanted.exact and not wanted.unknown
            steps.append(Lineage(stage.name, stage.kind, rows, is_exact, tuple(dict.fromkeys(wanted.notes))))
            if progress:
                progress(done + 1, len(stages))
        return tuple(steps)

    def _leading_to(self, start: BoundStage) -> list[BoundStage]:
        """Returns the stage and all that it is computed from, each after those that are computed from it."""
        needed, found = {start.name}, []
        for name in reversed(self._flow.stages):
            if name in needed:
                stage = self._flow.stages[name]
                found.append(stage)
                needed.update(self._inputs(stage))
        return found

    def _inputs(self, stage: BoundStage) -> list[str]:
        """Returns the stages that its rows come from. Sides of a join, what is kept for a per_key and the body of a
        loop are passed over.
        """
        if stage.kind in (JOIN, PER_KEY):
            return [self._flow.stages[side].inputs[0] for side in stage.inputs]
        if stage.kind == LOOP:
            members = {s.name for s in self._flow.stages.values() if s.loop == stage.name}
            entering = [name for m in members for name in self._flow.stages[m].inputs]
            return sorted(set(entering) - members)
        return list(stage.inputs)

    def _of(self, name: str) -> _Wanted:
        return self._wanted.setdefault(name, _Wanted())

    def _of_this_code(self, stage: BoundStage, name: str, rows: pa.Table) -> pa.Table:
        """Returns the wanted rows that the stage made by the code that it has. Of an input of others all rows are wanted."""
        epochs = rows.column(EPOCH_COLUMN).to_pylist()
        other = self._other.get(stage.name, set()).intersection(epochs)
        if not other:
            return rows
        if stage.kind in (FILTER, UNION, MAP, *IN_JVM):
            self._all(stage, name, other)
            return rows.filter(pa.array([t not in other for t in epochs]))
        self._of(name).exact = False
        self._of(name).notes.append(
            f"{stage.name} had other code up to epoch {max(other)}: rows of its keys by today's"
        )
        return rows

    def _all(self, stage: BoundStage, name: str, epochs: set[int]) -> None:
        """Wants all rows that an input had at some epochs."""
        of = self._of(name)
        of.exact = False
        of.notes.append(
            f"{stage.name} had other code up to epoch {max(epochs)}: all rows that came then, of which some count"
        )
        if not self._flow.stages[name].recorded:
            of.unknown |= epochs
            return
        for t, shard, fed in self._edges(name, epochs):
            of.add(t, shard, fed, np.ones(len(fed), dtype=np.bool_))

    def _known(self, name: str, epochs: Iterable[int]) -> set[int]:
        """Returns the epochs at which what an input had is known. At the others all that led to it is wanted."""
        unknown = set() if self._flow.stages[name].recorded else self._other.get(name, set()).intersection(epochs)
        self._of(name).unknown |= unknown
        return set(epochs) - unknown

    def _input(self, stage: BoundStage, name: str, rows: pa.Table) -> None:
        """Notes what the wanted rows of a stage make wanted of one of its inputs."""
        if not rows.num_rows:
            self._of(name)
        elif stage.kind == LOOP:
            self._of(name).exact = False
            self._of(name).notes.append(f"all rows that entered the loop {stage.name}, of which some led to the value")
            newest = max(rows.column(EPOCH_COLUMN).to_pylist())
            self._keep(name, lambda t, fed: np.full(len(fed), t <= newest), until=newest)
        elif stage.kind in (TIMED_UPDATE, OUTPUT):
            self._of(name).notes.append(f"rows of the keys of {stage.name}, of which its function used some")
            shared = [n for n in self._flow.stages[name].output.names if n in rows.column_names]
            self._by_key(name, rows, shared)
        elif isinstance(stage.options, FinalOptions):
            self._of_window(stage.options.windows, name, rows)
        elif stage.kind in _BY_SHARED_COLUMNS:
            shared = [n for n in self._flow.stages[name].output.names if n in rows.column_names]
            self._by_key(name, rows, shared)
        elif stage.window is not None:
            self._of_window(stage, name, rows)
        elif stage.kind in (FILTER, UNION):
            self._same_epoch(name, rows, self._flow.stages[name].output.names)
        elif stage.kind == MAP:
            self._through(stage, name, rows, self._sources_of_map)
        elif stage.kind in IN_JVM:
            self._through(stage, name, rows, self._sources_in_jvm)
        else:
            self._by_key(name, rows, [n for n in stage.key if n in rows.column_names])

    def _keep(self, name: str, mask: Callable[[int, pa.Table], Bools], *, until: int) -> None:
        of = self._of(name)
        for t, shard, fed in self._edges(name, self._known(name, range(self._first, until + 1))):
            of.add(t, shard, fed, mask(t, fed))

    def _by_key(self, name: str, rows: pa.Table, key: Sequence[str]) -> None:
        """Wants the input's rows of the same keys, up to the epoch at which each key is wanted last."""
        epochs = rows.column(EPOCH_COLUMN).to_numpy()

        def mask(t: int, fed: pa.Table) -> Bools:
            return matching(fed, rows.filter(pa.array(epochs >= t)), key)[0]

        self._keep(name, mask, until=int(epochs.max()))

    def _same_epoch(self, name: str, rows: pa.Table, columns: Sequence[str]) -> None:
        epochs = rows.column(EPOCH_COLUMN).to_numpy()

        def mask(t: int, fed: pa.Table) -> Bools:
            return matching(fed, rows.filter(pa.array(epochs == t)), columns)[0]

        self._keep(name, mask, until=int(epochs.max()))

    def _of_window(self, stage: BoundStage, name: str, rows: pa.Table) -> None:
        """Wants the rows of the window, without those that came too late for it."""
        window = stage.window
        assert window is not None
        late = part_of(stage.name, LATE)
        epochs = rows.column(EPOCH_COLUMN).to_numpy()

        def mask(t: int, fed: pa.Table) -> Bools:
            live = rows.filter(pa.array(epochs >= t))
            tagged = fed.append_column(TAG, pa.array(np.arange(len(fed))))
            spread = with_windows(tagged, window)
            if late != stage.name:
                left_out = self._changes(late, t)
                columns = [n for n in left_out.column_names if n in spread.column_names and n != CHANGE_TYPE_COLUMN]
                spread = spread.filter(pa.array(~matching(spread, left_out, columns)[0]))
            chosen = np.zeros(len(fed), dtype=np.bool_)
            if window.session:
                inside, at = matching(spread, live, [k for k in stage.key if k != START])
                starts, ends = (pc.cast(live.column(n), pa.int64()).to_numpy() for n in (START, END))
                begins = pc.cast(spread.column(START), pa.int64()).to_numpy(zero_copy_only=False)
                for i in np.flatnonzero(inside):  # a session's bounds moved as it grew: any of them will do
                    of_key = at == at[i]
                    inside[i] = bool(((starts <= begins[i]) & (begins[i] < ends))[of_key[len(spread) :]].any())
            else:
                inside = matching(spread, live, [n for n in stage.key if n in spread.column_names])[0]
            chosen[spread.column(TAG).to_numpy()[inside]] = True
            return chosen

        self._keep(name, mask, until=int(epochs.max()))

    def _through(
        self,
        stage: BoundStage,
        name: str,
        rows: pa.Table,
        sources: Callable[[BoundStage, pa.Table, pa.Table, LayerId], Indices | None],
    ) -> None:
        """Wants the rows that a function or an expression made the wanted ones from."""
        of = self._of(name)
        epochs = rows.column(EPOCH_COLUMN).to_numpy()
        for t, shard, fed in self._edges(name, self._known(name, epochs.tolist())):
            id = LayerId(TraceId(stage.name, stage.fingerprint, shard), Description.of_epoch(t))
            found = sources(stage, fed, rows.filter(pa.array(epochs == t)), id)
            if found is None:
                of.exact = False
                of.notes.append(
                    f"stage {stage.name} does not work row by row: all rows of its shards, of which some led to the value"
                )
                found = np.arange(len(fed))
            mask = np.zeros(len(fed), dtype=np.bool_)
            mask[found] = True
            of.add(t, shard, fed, mask)

    # --- functions --------------------------------------------------------------------------------------------------

    def _sources_of_map(self, stage: BoundStage, fed: pa.Table, wanted: pa.Table, id: LayerId) -> Indices | None:
        """Returns the rows that a function made the wanted rows from; None where it does not work row by row."""
        names = stage.output.names

        def run(rows: pa.Table) -> pa.Table:
            return conform(call(stage, id, rows), stage.rows_schema, id)

        whole = run(fed)
        hits = matching(whole, wanted, names)[0]
        if not hits.any():
            return np.zeros(0, dtype=np.int64)
        tagged = _try(lambda: call(stage, id, fed.append_column(TAG, pa.array(np.arange(len(fed))))))
        if isinstance(tagged, pa.Table) and tagged.column_names.count(TAG) == 1:
            without = _try(lambda: conform(tagged.drop_columns([TAG]), stage.rows_schema, id))
            if without is not None and without.equals(whole):
                return np.unique(tagged.column(TAG).to_numpy()[hits])
        half = len(fed) // 2
        parts = [_try(partial(run, part)) for part in (fed.slice(0, half), fed.slice(half))]
        if None in parts or not pa.concat_tables(parts).equals(whole):
            return None
        if len(whole) == len(fed) and len(parts[0]) == half:
            return np.flatnonzero(hits)
        return _by_halving(fed, lambda rows: bool(matching(run(rows), wanted, names)[0].any()))

    def _sources_in_jvm(self, stage: BoundStage, fed: pa.Table, wanted: pa.Table, id: LayerId) -> Indices:
        out = self._evaluate(stage, fed.append_column(TAG, pa.array(np.arange(len(fed)))), [TAG])
        hits = matching(out, wanted, stage.output.names)[0]
        return np.unique(out.column(TAG).to_numpy()[hits]).astype(np.int64)

    # --- rows -------------------------------------------------------------------------------------------------------

    def rows_of(self, name: str) -> pa.Table:
        """Returns all rows of a stage that is not recorded, up to the epoch."""
        found = [fed for _, _, fed in self._edges(name)]
        stage = self._flow.stages[name]
        return pa.concat_tables([f.select(stage.output.names) for f in found]) if found else stage.output.empty_table()

    def _edges(self, name: str, epochs: set[int] | None = None) -> Iterator[tuple[int, Shard, pa.Table]]:
        """Yields the rows of a stage by epoch and shard."""
        stage = self._flow.stages[name]
        for t in range(self._first, self._t + 1):
            if epochs is not None and t not in epochs:
                continue
            if stage.recorded and not _is_as_if_always(stage, self._t):
                numbers = self._recorded.shards(name, t, branch=self._branch)
                for i in numbers:
                    rows = self._changes(name, t, shard=i)
                    if rows is not None and rows.num_rows:
                        yield t, Shard(i, len(numbers)), rows
            else:
                of_shard: dict[int, tuple[Shard, list[pa.Table]]] = {}  # a union has several inputs
                for name_of_input in dict.fromkeys(stage.inputs):
                    for _, shard, fed in self._edges(name_of_input, {t}):
                        tables = of_shard.setdefault(shard.index, (shard, []))[1]
                        tables.append(self._computed(stage, fed, t, shard))
                for shard, tables in of_shard.values():
                    yield t, shard, pa.concat_tables(tables)

    def _computed(self, stage: BoundStage, fed: pa.Table, t: int, shard: Shard) -> pa.Table:
        if stage.kind in IN_JVM:
            return self._evaluate(stage, fed, [])
        id = LayerId(TraceId(stage.name, stage.fingerprint, shard), Description.of_epoch(t))
        if stage.kind == FILTER:
            return fed.filter(as_array(call(stage, id, fed)))
        if stage.kind == UNION:
            return (as_changes(fed) if stage.changing else fed).select(stage.rows_schema.names)
        return conform(call(stage, id, fed), stage.rows_schema, id)

    def _changes(self, name: str, t: int, *, shard: int | None = None) -> pa.Table:
        """Returns the changes at an epoch. Where they were merged away, the state as of `since` stands for all before
        it.
        """
        stage = self._flow.stages[name]
        begun = self._recorded.replaced_from(name, self._branch)
        if begun is not None and begun <= self._t and t <= begun:  # what it had before is another query's
            return self._all_at(stage, t, begun, shard)
        try:
            rows = self._recorded.changes(name, t - 1, t, shard=shard, branch=self._branch)
        except CompactedError:
            since = self._recorded.since()
            of = self._of(name)
            of.notes.append(f"what changed up to epoch {since} was merged away: the state as of {since} stands for it")
            return self._all_at(stage, t, since, shard)
        return with_columns_of(rows, stage.rows_schema)  # an upgrade may have added some since

    def _all_at(self, stage: BoundStage, t: int, at: int, shard: int | None) -> pa.Table:
        """Returns the state as of epoch `at` as the changes of that epoch, in the first shard; no others are there."""
        if t != at or shard not in (None, 0):
            return stage.rows_schema.empty_table()
        rows = self._recorded.read(stage.name, at, branch=self._branch)
        kinds = pa.array([INSERT] * len(rows), pa.string())
        return with_columns_of(rows.append_column(CHANGE_TYPE_COLUMN, kinds), stage.rows_schema)


def _is_as_if_always(stage: BoundStage, t: int) -> bool:
    """Returns whether a stateless stage began anew on the branch, up to an epoch.

    Then its code made all rows that are there, whenever what they are made of came.
    """
    return not stage.keyed and stage.bootstrap_at is not None and stage.bootstrap_at <= t


def _try(run: Callable[[], Any]) -> Any:
    """Returns None where it fails: a function for whole inputs may, on a part, or on a column too many."""
    try:
        return run()
    except Exception:  # noqa: BLE001 - the user's function; then another way is taken
        return None


def _by_halving(fed: pa.Table, hits: Callable[[pa.Table], bool]) -> Indices | None:
    """Returns the rows that alone make any of the wanted rows; None where that takes too many calls."""
    found, stack, calls = [], [(0, len(fed))], 0
    while stack:
        low, high = stack.pop()
        calls += 1
        if calls > _MOST_CALLS:
            return None
        if not hits(fed.slice(low, high - low)):
            continue
        if high - low == 1:
            found.append(low)
        else:
            middle = (low + high) // 2
            stack += [(low, middle), (middle, high)]
    return np.array(sorted(found), dtype=np.int64)


def _at(rows: pa.Table, t: int) -> pa.Table:
    return rows.append_column(EPOCH_COLUMN, pa.array(np.full(len(rows), t, dtype=np.int64)))


def matching(rows: pa.Table, wanted: pa.Table, columns: Sequence[str]) -> tuple[Bools, Indices]:
    """Returns which rows equal any wanted one in these columns (null equals null).

    Returns also a number for each row of both tables, which is the same where they are equal.
    """
    codes: Indices = np.zeros(len(rows) + len(wanted), dtype=np.int64)
    for name in columns:
        both = [comparable(as_array(table.column(name))) for table in (rows, wanted)]
        both[1] = both[1] if both[1].type == both[0].type else both[1].cast(both[0].type)
        encoded = pa.concat_arrays(both).dictionary_encode(null_encoding="encode")
        of_column = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes = np.unique(codes * (len(encoded.dictionary) + 1) + of_column, return_inverse=True)[1].astype(np.int64)
    return np.isin(codes[: len(rows)], codes[len(rows) :]), codes
