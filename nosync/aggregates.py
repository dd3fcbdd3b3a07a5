"""Aggregate functions for `Dataflow.aggregate`: how partial results are made, kept and combined, over whole columns.

Each function keeps accumulator columns in the stage's layer. An accumulator that is not itself the answer is
named `__<output>_<what>`; columns that begin with two underscores are internal state, hidden from reads.

An accumulator that rows can be taken out of again follows an input that changes. `min`, `max` and `count_distinct` need all
values for that: they keep, per key, the sorted multiset of values as a list of (value, how often). It is rewritten for
the keys that an epoch touches, so it suits keys with up to some ten thousand different values.

Nulls as in SQL: `count("x")`, sum, min, max and mean pass over nulls, and are null (count: 0) where there is nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columns import as_array
from nosync.lsm.errors import FlowError, SchemaError

ROWS = "__rows"
"""Accumulator of every aggregate over a changing input: input rows of the key, which goes when it reaches 0."""


@dataclass(frozen=True)
class Aggregate:
    """One aggregate function over one column (None: over rows). Made by `count`, `sum`, `min`, `max`, ..."""

    function: str
    column: str | None = None

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


def count_distinct(column: str) -> Aggregate:
    """Exact number of different values of a column of any ordered type. int64."""
    return Aggregate("count_distinct", column)


@dataclass(frozen=True)
class Accumulator:
    """A stored column: which column it is made of, how input rows enter it, and how two of it combine."""

    name: str
    type: pa.DataType
    source: str | None
    how: str
    """`rows` (number of rows), `count` (non-null values), `sum`, `min`, `max` or `values` (the multiset)."""


class Plan:
    """The aggregates of one stage, resolved against its input's schema.

    `retracts`: the input's rows can change, so accumulators must follow rows that go. Raises SchemaError for a column that
    is missing or of a type that the function does not take.
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
            pa.field(output, _output_type(agg, self.accumulators[acc]))
            for output, (agg, acc, _) in self._outputs.items()
        ]
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
        elif aggregate.function == "count_distinct" or (self.retracts and aggregate.function in ("min", "max")):
            _check_ordered(stage, aggregate, type_)
            self._keep(
                output, Accumulator(f"__{output}_values", values_type(type_), aggregate.column, "values"), aggregate
            )
        elif aggregate.function in ("min", "max"):
            _check_ordered(stage, aggregate, type_)
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
        ones = weights if weights is not None else pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
        columns: dict[str, pa.Array] = {f"k{i}": rows.column(name) for i, name in enumerate(self.key)}
        columns |= {"hash": hashes, "ones": ones}
        functions: list[tuple[str, str]] = [("hash", "min"), ("ones", "list")]
        for i, accumulator in enumerate(self.accumulators.values()):
            columns[f"a{i}"] = _contribution(rows, accumulator, ones)
            functions.append((f"a{i}", _GROUPING.get(accumulator.how, "sum")))
        keys = list(columns)[: len(self.key)]
        grouped = pa.table(columns).group_by(keys, use_threads=False).aggregate(functions)
        arrays = [as_array(grouped.column(key)) for key in keys]
        for (name, function), accumulator in zip(functions[2:], self.accumulators.values(), strict=True):
            found = as_array(grouped.column(f"{name}_{function}"))
            if accumulator.how == "values":
                found = _entries(found, as_array(grouped.column("ones_list")), accumulator.type)
            arrays.append(found.cast(accumulator.type))
        return pa.Table.from_arrays(arrays, names=[*self.key, *self.accumulators]), as_array(grouped.column("hash_min"))

    def combine(self, partial: pa.Table, before: pa.Table) -> pa.Table:
        """New accumulators: `partial` with `before` (same keys in the same rows; null where a key is new)."""
        columns = [partial.column(name) for name in self.key]
        for accumulator in self.accumulators.values():
            new, old = partial.column(accumulator.name), before.column(accumulator.name)
            if accumulator.how == "values":
                columns.append(_merge_values(new, old, accumulator.type))
            elif accumulator.how in ("min", "max"):
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
            if self.accumulators[total].how == "values":
                columns[output] = _answer(aggregate.function, columns[total])
            elif aggregate.function == "mean":
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


def _contribution(rows: pa.Table, accumulator: Accumulator, ones: pa.Array) -> pa.Array:
    """What each input row adds to an accumulator; `ones` is -1 for rows that went."""
    if accumulator.how == "rows":
        return ones
    column = rows.column(accumulator.source)
    if accumulator.how in ("min", "max", "values"):
        return column
    if accumulator.how == "count":
        return pc.multiply(pc.is_valid(column).cast(pa.int64()), ones)
    return pc.multiply(column.cast(accumulator.type), ones.cast(accumulator.type)).cast(accumulator.type)


_GROUPING = {"min": "min", "max": "max", "values": "list"}


def values_type(type_: pa.DataType) -> pa.DataType:
    """How a multiset is stored: its different values in order, and how often each occurs."""
    return pa.list_(pa.struct([pa.field("value", type_), pa.field("n", pa.int64())]))


def _output_type(aggregate: Aggregate, accumulator: Accumulator) -> pa.DataType:
    if aggregate.function == "mean":
        return pa.float64()
    if aggregate.function == "count_distinct":
        return pa.int64()
    return accumulator.type.value_type.field("value").type if accumulator.how == "values" else accumulator.type


def _check_ordered(stage: str, aggregate: Aggregate, type_: pa.DataType) -> None:
    if pa.types.is_nested(type_) or pa.types.is_null(type_):
        raise SchemaError(
            f"stage {stage}: {aggregate}: column {aggregate.column!r} is {type_}, whose values have no order"
        )


def _entries(values: pa.ListArray, ones: pa.ListArray, type_: pa.DataType) -> pa.ListArray:
    """Two lists of the same lengths as one list of pairs."""
    pairs = pa.StructArray.from_arrays([values.flatten(), ones.flatten()], fields=list(type_.value_type))
    return pa.ListArray.from_arrays(values.offsets, pairs, type=type_)


def _flat(lists: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """The row, value and number of each entry of a column of multisets."""
    entries = lists.flatten()
    return pc.list_parent_indices(lists).cast(pa.int64()), entries.field("value"), entries.field("n")


def _merge_values(new: pa.ChunkedArray, old: pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    """The multisets of `old` with the entries of `new` added (or taken out, where their number is negative)."""
    rows = len(new)
    parts = [_flat(as_array(column).cast(type_)) for column in (new, old)]
    names = ("row", "value", "n")
    flat = pa.table({name: pa.concat_arrays([part[i] for part in parts]) for i, name in enumerate(names)})
    flat = flat.filter(pc.is_valid(flat["value"]))
    summed = flat.group_by(["row", "value"], use_threads=False).aggregate([("n", "sum")])
    summed = summed.filter(pc.not_equal(summed["n_sum"], 0))
    summed = summed.sort_by([("row", "ascending"), ("value", "ascending")])
    lengths = np.bincount(summed["row"].to_numpy(), minlength=rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    entries = pa.StructArray.from_arrays(
        [as_array(summed["value"]), as_array(summed["n_sum"])], fields=list(type_.value_type)
    )
    return pa.ListArray.from_arrays(offsets, entries, type=type_)


def _answer(function: str, values: pa.ChunkedArray) -> pa.Array:
    """What an aggregate says of each multiset."""
    lists = as_array(values)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    if function == "count_distinct":
        return pa.array(lengths, pa.int64())
    ends = np.cumsum(lengths)
    at = ends - lengths if function == "min" else ends - 1
    return lists.flatten().field("value").take(pa.array(at, mask=lengths == 0))
