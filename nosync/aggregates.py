"""Aggregate functions for `Dataflow.aggregate`: how partial results are made, kept and combined, over whole columns.

Each function keeps accumulator columns in the stage's layer. An accumulator that is not itself the answer is
named `__<output>_<what>`; columns that begin with two underscores are internal state, hidden from reads.

Nulls as in SQL: `count("x")`, sum, min, max and mean pass over nulls, and are null (count: 0) where there is nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.errors import FlowError, SchemaError

INTERNAL_PREFIX = "__"
ROWS = "__rows"
"""Accumulator of every aggregate over a changing input: input rows of the key, which goes when it reaches 0."""


@dataclass(frozen=True)
class Aggregate:
    """One aggregate function over one column (None: over rows). Made by `count`, `sum`, `min`, `max`, `mean`."""

    function: str
    column: str | None = None

    @property
    def can_retract(self) -> bool:
        """Whether a row can be taken back out of the accumulator."""
        return self.function in ("count", "sum", "mean")

    def __str__(self) -> str:
        return f"{self.function}({self.column or ''})"


def count(column: str | None = None) -> Aggregate:
    """Number of rows, or of non-null values of `column`. int64."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum of a numeric column: int64 for integers, double for floats, decimal(38, s) for decimals."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Smallest value of a column of any ordered type."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Largest value of a column of any ordered type."""
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """Mean of a numeric column. double."""
    return Aggregate("mean", column)


@dataclass(frozen=True)
class Accumulator:
    """A stored column: which column it is made of, how input rows enter it, and how two of it combine."""

    name: str
    type: pa.DataType
    source: str | None
    how: str
    """`rows` (number of rows), `count` (non-null values), `sum`, `min` or `max`."""


class Plan:
    """The aggregates of one stage, resolved against its input's schema.

    Raises SchemaError for a column that is missing or of a type that the function does not take, FlowError for
    a function that cannot take rows back over an input that changes.
    """

    def __init__(
        self, stage: str, key: Sequence[str], aggregates: Mapping[str, Aggregate], schema: pa.Schema, *, retracts: bool
    ) -> None:
        self.key = tuple(key)
        self.retracts = retracts
        self._outputs: dict[str, tuple[Aggregate, str, str]] = {}  # output -> function, accumulator, count accumulator
        self.accumulators: dict[str, Accumulator] = {}
        if retracts:
            self.accumulators[ROWS] = Accumulator(ROWS, pa.int64(), None, "rows")
        for output, aggregate in aggregates.items():
            self._add(stage, output, aggregate, schema)
        fields = [pa.field(name, schema.field(name).type) for name in self.key]
        fields += [
            pa.field(output, pa.float64() if agg.function == "mean" else self.accumulators[acc].type)
            for output, (agg, acc, _) in self._outputs.items()
        ]
        self.output_schema = pa.schema(fields)
        hidden = [pa.field(a.name, a.type) for a in self.accumulators.values() if a.name not in self._outputs]
        self.schema = pa.schema([*fields, *hidden])
        """What the stage's layers hold: key, outputs, then internal accumulators."""

    def _add(self, stage: str, output: str, aggregate: Aggregate, schema: pa.Schema) -> None:
        if not isinstance(aggregate, Aggregate):
            raise FlowError(
                f"stage {stage}: {output}={aggregate!r} is not an aggregate: use nosync.count(), nosync.sum(...)"
            )
        if output in self.key or output.startswith("_"):
            raise FlowError(f"stage {stage}: {output!r} cannot name an aggregate: it is a key column or begins with _")
        if self.retracts and not aggregate.can_retract:
            raise FlowError(
                f"stage {stage}: {aggregate} over an input whose rows change (an aggregate or update stage) is not "
                "supported: a row that goes may have been the extreme one. Aggregate the original stream instead"
            )
        if aggregate.column is None:
            self._keep(output, Accumulator(output, pa.int64(), None, "rows"), aggregate)
            return
        if aggregate.column not in schema.names:
            raise SchemaError(
                f"stage {stage}: {aggregate}: the input has no column {aggregate.column!r}; it has {', '.join(schema.names)}"
            )
        type_ = schema.field(aggregate.column).type
        if aggregate.function == "count":
            self._keep(output, Accumulator(output, pa.int64(), aggregate.column, "count"), aggregate)
        elif aggregate.function in ("min", "max"):
            self._keep(output, Accumulator(output, type_, aggregate.column, aggregate.function), aggregate)
        else:
            total = Accumulator(
                output if aggregate.function == "sum" else f"__{output}_sum", _sum_type(stage, aggregate, type_),
                aggregate.column, "sum",
            )  # fmt: skip
            counted = ""
            if self.retracts or aggregate.function == "mean":
                counted = f"__{output}_count"
                self.accumulators[counted] = Accumulator(counted, pa.int64(), aggregate.column, "count")
            self._keep(output, total, aggregate, counted)

    def _keep(self, output: str, accumulator: Accumulator, aggregate: Aggregate, counted: str = "") -> None:
        self.accumulators[accumulator.name] = accumulator
        self._outputs[output] = (aggregate, accumulator.name, counted)

    def partial(self, rows: pa.Table, hashes: pa.Array, weights: pa.Array | None) -> tuple[pa.Table, pa.Array]:
        """One row of accumulators per key of `rows` (in order of first appearance), and each key's hash.

        `weights` is +1 for rows that came and -1 for rows that went; None: all came. Single-threaded, because the order
        in which floats are added must not depend on scheduling.
        """
        columns: dict[str, pa.Array] = {f"k{i}": rows.column(name) for i, name in enumerate(self.key)}
        columns["hash"] = hashes
        functions: list[tuple[str, str]] = [("hash", "min")]
        for i, accumulator in enumerate(self.accumulators.values()):
            columns[f"a{i}"] = _contribution(rows, accumulator, weights)
            functions.append((f"a{i}", accumulator.how if accumulator.how in ("min", "max") else "sum"))
        keys = [f"k{i}" for i in range(len(self.key))]
        grouped = pa.table(columns).group_by(keys, use_threads=False).aggregate(functions)
        names = dict(zip([f"{c}_{f}" for c, f in functions], ["hash", *self.accumulators], strict=True))
        found = {names.get(name, name): grouped.column(name).combine_chunks() for name in grouped.column_names}
        arrays = [found[f"k{i}"] for i in range(len(self.key))]
        arrays += [found[a.name].cast(a.type) for a in self.accumulators.values()]
        return pa.Table.from_arrays(arrays, names=[*self.key, *self.accumulators]), found["hash"]

    def combine(self, partial: pa.Table, before: pa.Table) -> pa.Table:
        """New accumulators: `partial` with `before` (same keys in the same rows; null where a key is new)."""
        columns = [partial.column(name) for name in self.key]
        for accumulator in self.accumulators.values():
            new, old = partial.column(accumulator.name), before.column(accumulator.name)
            if accumulator.how in ("min", "max"):
                function = pc.min_element_wise if accumulator.how == "min" else pc.max_element_wise
                columns.append(function(new, old, skip_nulls=True))
            else:
                # A side that is null adds nothing; both null stay null, as a SQL sum of no values.
                columns.append(pc.coalesce(pc.add(new, old), new, old).cast(accumulator.type))
        return pa.Table.from_arrays(columns, names=partial.column_names)

    def finish(self, accumulators: pa.Table) -> pa.Table:
        """The rows that the layer stores: key, outputs, internal accumulators (`schema`)."""
        columns = {name: accumulators.column(name) for name in accumulators.column_names}
        for output, (aggregate, total, counted) in self._outputs.items():
            if aggregate.function == "mean":
                # Null where nothing was counted: dividing by zero would give NaN.
                n = columns[counted]
                n = pc.if_else(pc.greater(n, 0), n, None)
                columns[output] = pc.divide(columns[total].cast(pa.float64()), n.cast(pa.float64()))
            elif counted:
                columns[output] = pc.if_else(pc.greater(columns[counted], 0), columns[total], None)
        return pa.Table.from_arrays([columns[f.name].cast(f.type) for f in self.schema], schema=self.schema)


def _sum_type(stage: str, aggregate: Aggregate, type_: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    if pa.types.is_decimal(type_):
        return pa.decimal128(38, type_.scale)
    raise SchemaError(f"stage {stage}: {aggregate}: column {aggregate.column!r} is {type_}, expected a number")


def _contribution(rows: pa.Table, accumulator: Accumulator, weights: pa.Array | None) -> pa.Array:
    """What each input row adds to an accumulator."""
    if accumulator.how == "rows":
        return weights if weights is not None else pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
    column = rows.column(accumulator.source)
    if accumulator.how in ("min", "max"):
        return column
    if accumulator.how == "count":
        valid = pc.is_valid(column).cast(pa.int64())
        return valid if weights is None else pc.multiply(valid, weights)
    values = column.cast(accumulator.type)
    return values if weights is None else pc.multiply(values, weights.cast(accumulator.type)).cast(accumulator.type)
