"""Dataflows: a graph of named stages, declared without Spark and without data.

    flow = nosync.Dataflow("flights")
    flights = flow.source("flights", "origin string, carrier string, dep_delay double")
    flown = flights.map("flown", drop_cancelled)
    delays = flown.aggregate("delays", key=["origin"], n=nosync.count(), worst=nosync.max("dep_delay"))

Every stage is a pure function of its inputs' changes at an epoch and its own state before it. `Job` runs a flow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from nosync.aggregates import Aggregate
from nosync.lsm.directory import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS
from nosync.lsm.errors import FlowError
from nosync.lsm.layer import check_name

SOURCE, MAP, FILTER, AGGREGATE, UPDATE = "source", "map", "filter", "aggregate", "update"
STATELESS = frozenset({MAP, FILTER})

MapFunction = Callable[[pa.Table], pa.Table]
FilterFunction = Callable[[pa.Table], Any]
UpdateFunction = Callable[[pa.Table, pa.Table], pa.Table]


@dataclass(frozen=True)
class Stage:
    """The declaration of one stage, and the handle to build on it. Made by the methods of Dataflow and Stage."""

    flow: Dataflow = field(repr=False, compare=False)
    name: str
    kind: str
    input: str | None = None
    key: tuple[str, ...] = ()
    function: Callable[..., Any] | None = field(default=None, repr=False)
    schema: str | None = None
    """DDL: of a source its columns, of an update its state columns, of a map its output where it cannot be inferred."""
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)
    version: str | None = None

    def map(self, name: str, fn: MapFunction, *, schema: str | None = None, version: str | None = None) -> Stage:
        """Applies a pure function to the rows of each shard and epoch: `fn(rows: pa.Table) -> pa.Table`.

        It may drop, change and add rows and columns. Each row must be treated by itself: how rows are cut into
        tables is not part of the contract. Over an input that changes (after aggregate or update) the table has a
        `_change_type` column that must be kept. `schema` (DDL) states the output where calling
        `fn` on an empty table cannot show it; `version` replaces the code in the fingerprint.
        """
        return self.flow._add(Stage(self.flow, name, MAP, self.name, function=fn, schema=schema, version=version))

    def flat_map(self, name: str, fn: MapFunction, *, schema: str | None = None, version: str | None = None) -> Stage:
        """As `map`, for functions that make several rows of one: a synonym, for readers."""
        return self.map(name, fn, schema=schema, version=version)

    def filter(self, name: str, predicate: FilterFunction, *, version: str | None = None) -> Stage:
        """Keeps the rows for which `predicate(rows: pa.Table)`, a boolean array of the same length, is true."""
        return self.flow._add(Stage(self.flow, name, FILTER, self.name, function=predicate, version=version))

    def aggregate(self, name: str, *, key: Sequence[str], **aggregates: Aggregate) -> Stage:
        """Keeps aggregates per key, up to date with all epochs: `n=nosync.count(), total=nosync.sum("x")`.

        Output: one row per key, key columns then one column per aggregate.
        """
        if not aggregates:
            raise FlowError(f"stage {name}: give at least one aggregate, such as n=nosync.count()")
        return self.flow._add(
            Stage(self.flow, name, AGGREGATE, self.name, key=_check_key(name, key), aggregates=aggregates)
        )

    def update(
        self, name: str, *, key: Sequence[str], state: str, fn: UpdateFunction, version: str | None = None
    ) -> Stage:
        """Keeps arbitrary state per key: `fn(changes: pa.Table, state: pa.Table) -> pa.Table`, once a shard and epoch.

        `changes` has the input's columns and `_change_type`, in canonical order; `state` the rows (key columns and the
        columns of the DDL `state`) of those keys in `changes` that have one. `fn` returns the new rows of
        these keys, in any order; a key with state that it leaves out is deleted.
        """
        return self.flow._add(
            Stage(
                self.flow,
                name,
                UPDATE,
                self.name,
                key=_check_key(name, key),
                function=fn,
                schema=state,
                version=version,
            )
        )


def _check_key(stage: str, key: Sequence[str]) -> tuple[str, ...]:
    if isinstance(key, str):
        raise FlowError(f"stage {stage}: key is {key!r}, expected a list of column names: [{key!r}]")
    if not key or len(set(key)) != len(key):
        raise FlowError(f"stage {stage}: key is {list(key)}, expected one or more different column names")
    return tuple(key)


class Dataflow:
    """A graph of stages. `key_groups` is the most shards it can ever run with; it must be the store's."""

    def __init__(self, name: str, *, key_groups: int = DEFAULT_KEY_GROUPS) -> None:
        self.name = check_name(name, "dataflow name")
        if not isinstance(key_groups, int) or not 1 <= key_groups <= MAX_KEY_GROUPS:
            raise FlowError(f"dataflow {name}: key_groups is {key_groups!r}, expected 1 to {MAX_KEY_GROUPS}")
        self.key_groups = key_groups
        self._stages: dict[str, Stage] = {}

    def source(self, name: str, schema: str) -> Stage:
        """An input: `schema` is Spark DDL such as `"origin string, dep_delay double"`. Each epoch brings new rows."""
        return self._add(Stage(self, name, SOURCE, schema=schema))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In the order of declaration, which is a topological one: a stage is built on one that exists."""
        return tuple(self._stages.values())

    @property
    def sources(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.kind == SOURCE)

    def consumers(self, name: str) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.input == name)

    def _add(self, stage: Stage) -> Stage:
        check_name(stage.name, "stage name")
        if stage.name in self._stages:
            raise FlowError(f"dataflow {self.name}: two stages are named {stage.name!r}; give each its own name")
        if stage.function is not None and not callable(stage.function):
            raise FlowError(f"stage {stage.name}: {stage.function!r} is not a function")
        self._stages[stage.name] = stage
        return stage

    def __repr__(self) -> str:
        return f"<nosync.Dataflow {self.name}: {' '.join(self._stages)}>"
