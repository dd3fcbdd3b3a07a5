"""The plan of a stage's aggregates: which accumulators it keeps, and how a layer's rows come of them, over whole
columns.

An accumulator that is not itself the answer is named `__<output>_<what>`. Columns that begin with two underscores are
internal state, hidden from reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.accumulators import (
    OF_VALUES,
    Accumulator,
    answer,
    as_doubles,
    check_ordered,
    combined,
    combined_moments,
    contributed,
    entries_of,
    mean_of,
    moments,
    multisets,
    output_type,
    source_of,
    strange_of,
    sum_type,
    values_type,
)
from nosync.kernels.aggregates import Aggregate
from nosync.kernels.groups import Groups
from nosync.kernels.sums import DoesNotFitError, Sum, count_not_finite, sum_of
from nosync.lsm.columnar.columns import Indices, as_array, take
from nosync.lsm.columnar.hashing import U32
from nosync.lsm.errors import SchemaError
from nosync.lsm.platform.nearest import did_you_mean

ROWS = "__rows"
"""The accumulator of every aggregate over a changing input: input rows of the key, which goes when it reaches 0."""
ALL_ROWS, ALL_ROWS_TYPE = "__all", pa.int8()
"""The key of an aggregate over all rows, which is the same in each of them."""


class Plan:
    """The aggregates of one stage, resolved against its input's schema."""

    def __init__(
        self, stage: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pa.Schema, *, retracts: bool
    ) -> None:
        """`retracts` says that the input's rows can change, so that accumulators must follow rows that go.

        Raises SchemaError for a column that is missing or of a type that the function does not take.
        """
        self.key = tuple(key)
        self.retracts = retracts
        self.is_of_rows = False
        """Says whether it keeps one row per key of those that there are, and has no aggregates."""
        self._outputs: dict[str, tuple[Aggregate, str, str]] = {}  # output -> function, accumulator, count accumulator
        self.accumulators: dict[str, Accumulator] = {}
        self._sums: dict[str, Sum] = {}
        if retracts:
            self.accumulators[ROWS] = Accumulator(ROWS, pa.int64(), None, "rows")
        for output, aggregate in aggregates.items():
            self._add(stage, output, aggregate, schema)
        fields = [pa.field(name, schema.field(name).type) for name in self.key]
        fields += [
            pa.field(output, output_type(agg, self.accumulators[acc]))
            for output, (agg, acc, _) in self._outputs.items()
        ]
        hidden = [pa.field(a.name, a.type) for a in self.accumulators.values() if a.name not in self._outputs]
        hidden += [pa.field(name, type_) for sum_ in self._sums.values() for name, type_ in sum_.beside.items()]
        self.schema = pa.schema([*fields, *hidden])
        """The columns of the stage's layers: key, outputs, then internal accumulators."""
        of_sums = [name for sum_ in self._sums.values() for name in sum_.beside]
        self.rare = frozenset([*of_sums, *(a.name for a in self.accumulators.values() if a.how == "strange")])
        """Columns that a layer has only where one of its rows has a value there, as versions before had none of them.
        """

    @property
    def sums(self) -> tuple[str, ...]:
        """Returns the outputs that may be added up over keys."""
        return tuple(output for output, (a, _, _) in self._outputs.items() if a.function in ("count", "sum"))

    @property
    def functions(self) -> dict[str, str]:
        """Returns what the state of each output is of: another function has no use for it. Empty for a plan of rows."""
        return {output: aggregate.state for output, (aggregate, _, _) in self._outputs.items() if aggregate.state}

    @property
    def is_over_all_rows(self) -> bool:
        """Returns whether there is one row, with or without rows in the input."""
        return self.key == (ALL_ROWS,)

    @classmethod
    def of_rows(cls, stage: str, key: Sequence[str], columns: Sequence[str], schema: pa.Schema) -> Plan:
        """Returns a plan for one row per key of an input that changes: the smallest by contents of those that are
        there.
        """
        plan = cls(stage, key, {}, schema, retracts=True)
        plan.is_of_rows = True
        for name in columns:
            check_ordered(stage, Aggregate("field", name), schema.field(name).type)
        if columns:
            rows = Accumulator(
                "__row_values",
                values_type([schema.field(name).type for name in columns]),
                columns[0],
                "values",
                tuple(columns),
                nulls=True,
            )
            plan.accumulators[rows.name] = rows
            plan._outputs = {name: (Aggregate("field", name), rows.name, "") for name in columns}
        fields = [schema.field(name) for name in (*key, *columns)]
        hidden = [pa.field(a.name, a.type) for a in plan.accumulators.values()]
        plan.schema = pa.schema([*fields, *hidden])
        return plan

    def _add(self, stage: str, output: str, aggregate: Aggregate, schema: pa.Schema) -> None:
        if aggregate.column is None:
            self._keep(output, Accumulator(output, pa.int64(), None, "rows"), aggregate)
            return
        if aggregate.column not in schema.names:
            raise SchemaError(
                f"stage {stage}: {aggregate}: the input has no column {aggregate.column!r}; it has "
                f"{', '.join(schema.names)}"
                f"{did_you_mean(aggregate.column, schema.names)}"
            )
        type_ = schema.field(aggregate.column).type
        if aggregate.function == "count":
            self._keep(output, Accumulator(output, pa.int64(), aggregate.column, "count"), aggregate)
        elif aggregate.function in OF_VALUES or (self.retracts and aggregate.function in ("min", "max")):
            self._keep(output, self._values(stage, output, aggregate, schema), aggregate)
        elif aggregate.function in ("min", "max"):
            check_ordered(stage, aggregate, type_)
            self._keep(output, Accumulator(output, type_, aggregate.column, aggregate.function), aggregate)
        elif aggregate.function in ("variance", "stddev"):
            sum_type(stage, aggregate, type_)
            counted = f"__{output}_count"
            self.accumulators[counted] = Accumulator(counted, pa.int64(), aggregate.column, "count")
            mean = f"__{output}_mean"
            self.accumulators[mean] = Accumulator(mean, pa.float64(), aggregate.column, "mean")
            m2 = Accumulator(f"__{output}_m2", pa.float64(), aggregate.column, "m2")
            self._keep(output, m2, aggregate, counted)
            if self.retracts and pa.types.is_floating(type_):
                strange = strange_of(m2)
                self.accumulators[strange] = Accumulator(strange, pa.int64(), aggregate.column, "strange")
        else:
            is_answer, kept_type = aggregate.function == "sum", sum_type(stage, aggregate, type_)
            total = Accumulator(output if is_answer else f"__{output}_sum", kept_type, aggregate.column, "sum")
            self._sums[total.name] = sum_of(output, total.name, kept_type, retracts=self.retracts, is_answer=is_answer)
            counted = ""
            if self.retracts or aggregate.function == "mean":
                counted = f"__{output}_count"
                self.accumulators[counted] = Accumulator(counted, pa.int64(), aggregate.column, "count")
            self._keep(output, total, aggregate, counted)

    def _values(self, stage: str, output: str, aggregate: Aggregate, schema: pa.Schema) -> Accumulator:
        """Returns the multiset that the aggregate is answered from."""
        assert aggregate.column is not None
        fields = (aggregate.column,) if aggregate.by is None else (aggregate.by, aggregate.column)
        for name in fields:
            if name not in schema.names:
                raise SchemaError(
                    f"stage {stage}: {aggregate}: the input has no column {name!r}; it has {', '.join(schema.names)}"
                    f"{did_you_mean(name, schema.names)}"
                )
            check_ordered(stage, aggregate, schema.field(name).type)
        type_ = values_type([schema.field(name).type for name in fields])
        enough = {"first": 1, "last": 1, "top_k": aggregate.limit, "collect": aggregate.limit}
        return Accumulator(
            f"__{output}_values",
            type_,
            aggregate.column,
            "values",
            fields,
            keep=None if self.retracts else enough.get(aggregate.function),
            descending=aggregate.function in ("last", "top_k"),
        )

    def _keep(self, output: str, accumulator: Accumulator, aggregate: Aggregate, counted: str = "") -> None:
        self.accumulators[accumulator.name] = accumulator
        self._outputs[output] = (aggregate, accumulator.name, counted)

    def partial(self, rows: pa.Table, hashes: U32, weights: pa.Array | None) -> tuple[pa.Table, Indices]:
        """Returns one row of accumulators per key of `rows`, in order of (hash, key), and for each the row where it
        occurs first.

        `hashes` are of the key's columns, or of some of them and what tells others apart (`Groups.of`). `weights` is +1
        for rows that came and -1 for rows that went. It is None if all came.
        """
        groups = Groups.of([as_array(rows.column(name)) for name in self.key], hashes)
        return self.partial_of(groups, rows, weights), groups.first

    def partial_of(self, groups: Groups, rows: pa.Table, weights: pa.Array | None) -> pa.Table:
        """Returns one row of accumulators per group of `rows`, all rows of which have the same key. See `partial`."""
        found: dict[str, pa.Array] = {}
        for accumulator in self.accumulators.values():
            if accumulator.how == "values":
                found[accumulator.name] = multisets(
                    entries_of(rows, weights, groups, accumulator), len(groups), accumulator
                )
            elif accumulator.how == "m2":
                found |= moments(rows, weights, groups, accumulator)
            elif accumulator.how == "sum":
                found |= self._sums[accumulator.name].of_groups(source_of(rows, accumulator), weights, groups)
            elif accumulator.how == "strange":
                found[accumulator.name] = count_not_finite(source_of(rows, accumulator), weights, groups)
            elif accumulator.how != "mean":
                found[accumulator.name] = contributed(rows, weights, groups, accumulator)
        keys = {name: take(as_array(rows.column(name)), groups.first) for name in self.key}
        return pa.table(keys | found)

    def combine(self, partial: pa.Table, before: pa.Table) -> pa.Table:
        """Returns new accumulators: `partial` with `before` (same keys in the same rows, which are null where a key is
        new).

        `before` is as layers have it. What this returns is, as `partial`, in the wide form of sums
        (nosync.kernels.sums).
        """
        columns = {name: partial.column(name) for name in self.key}
        for accumulator in self.accumulators.values():
            if accumulator.how == "sum":
                sum_ = self._sums[accumulator.name]
                columns |= sum_.added(_wide(sum_, partial), sum_.widened(before))
            elif accumulator.how == "m2":
                columns[mean_of(accumulator)], columns[accumulator.name] = combined_moments(
                    partial, before, accumulator
                )
            elif accumulator.how != "mean":
                new, old = partial.column(accumulator.name), before.column(accumulator.name)
                columns[accumulator.name] = combined(new, old, accumulator)
        return pa.table(columns)

    def finish(self, accumulators: pa.Table) -> pa.Table:
        """Returns the rows that the layer stores: key, outputs, internal accumulators (`schema`).

        Raises OverflowError where a sum is beyond the type that it has in the output.
        """
        columns = {name: accumulators.column(name) for name in accumulators.column_names}
        for output, (aggregate, total, counted) in self._outputs.items():
            if self.accumulators[total].how == "values":
                columns[output] = answer(aggregate, columns[total], self.accumulators[total])
            elif aggregate.function == "mean":
                # Null where nothing was counted: dividing by zero would give NaN.
                n = columns[counted]
                n = pc.if_else(pc.greater(n, 0), n, None)
                sum_ = self._sums[total]
                columns[output] = pc.divide(sum_.doubles(_wide(sum_, accumulators)), as_doubles(as_array(n)))
                columns |= sum_.recorded(_wide(sum_, accumulators))
            elif aggregate.function in ("variance", "stddev"):
                columns[output] = self._spread(aggregate, accumulators, total, counted)
            elif aggregate.function == "sum":
                columns |= self._sum(output, aggregate, accumulators)
                if counted:
                    columns[output] = pc.if_else(pc.greater(columns[counted], 0), columns[total], None)
        return pa.Table.from_arrays([columns[f.name].cast(f.type) for f in self.schema], schema=self.schema)

    def _spread(self, aggregate: Aggregate, accumulators: pa.Table, total: str, counted: str) -> pa.Array:
        """Returns a variance or standard deviation: null for fewer than two values, and NaN where one of them is not
        finite.
        """
        n = as_array(accumulators.column(counted))
        n = pc.if_else(pc.greater(n, 1), pc.subtract(n, 1), None)
        found = pc.divide(as_array(accumulators.column(total)), n.cast(pa.float64()))
        strange = strange_of(self.accumulators[total])
        if strange in self.accumulators:
            is_strange = accumulators.column(strange).is_valid()
            found = pc.if_else(pc.and_(as_array(is_strange), n.is_valid()), pa.scalar(np.nan), found)
        return pc.sqrt(found) if aggregate.function == "stddev" else found

    def _sum(self, output: str, aggregate: Aggregate, accumulators: pa.Table) -> dict[str, pa.Array]:
        """Returns the columns of a sum. Raises OverflowError where one is beyond its type, naming the key."""
        sum_ = self._sums[output]
        try:
            return sum_.recorded(_wide(sum_, accumulators))
        except DoesNotFitError as error:
            key = accumulators.select(list(self.key)).slice(error.row, 1).to_pylist()[0]
            whose = "all rows" if self.is_over_all_rows else f"key {key}"
            column = aggregate.column
            raise OverflowError(
                f"{output}, {aggregate}, of {whose} is {error.value}, beyond {error.beyond}: cast {column!r} before, "
                "as "
                f'select(..., "CAST({column} AS {error.cast}) AS {column}") does'
            ) from None


def _wide(sum_: Sum, accumulators: pa.Table) -> dict[str, pa.Array]:
    """Returns the columns of a sum in its wide form."""
    return {name: as_array(accumulators.column(name)) for name in sum_.memory}
