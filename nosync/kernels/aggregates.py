"""Aggregate functions for `Dataflow.aggregate`: how partial results are made, kept and combined, over whole columns.

Each function keeps accumulator columns in the stage's layer. An accumulator that is not itself the answer is
named `__<output>_<what>`; columns that begin with two underscores are internal state, hidden from reads.

An accumulator that rows can be taken out of again follows an input that changes. `min`, `max`, `first`, `last`, `top_k`,
`collect` and `count_distinct` need all values for that: they keep, per key, the sorted multiset of values as a list of
(value, how often). It is rewritten for the keys that an epoch touches, so it suits keys with up to some ten thousand
different values. Over an input that only grows, no more is kept than the answer needs.

`variance` and `stddev` keep (count, mean, sum of squared differences from the mean), combined by the formula of Chan, Golub
and LeVeque (1979), which does not lose digits when the mean is large. Over rows that change they are of the finite values, and
beside them is how many are not. `nosync.kernels.sums` says how sums are kept.

Nulls as in SQL: `count("x")`, sum, min, max and mean pass over nulls, and are null (count: 0) where there is nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.groups import SUM, Groups
from nosync.kernels.sums import DoesNotFitError, Sum, count_not_finite, counts_added, sum_of
from nosync.lsm.columnar.columns import Indices, as_array, take
from nosync.lsm.columnar.hashing import U32
from nosync.lsm.errors import FlowError, SchemaError
from nosync.lsm.platform.nearest import did_you_mean

MAX_LIST = 100_000
_NOISE = 32 * np.finfo(np.float64).eps
"""Of a spread that others were taken out of: less than this share is rounding, as where all that is left is equal."""
ROWS = "__rows"
"""Accumulator of every aggregate over a changing input: input rows of the key, which goes when it reaches 0."""
ALL_ROWS, ALL_ROWS_TYPE = "__all", pa.int8()
"""The key of an aggregate over all rows: the same in each of them."""


@dataclass(frozen=True)
class Aggregate:
    """One aggregate function over one column (None: over rows). Made by `count`, `sum`, `min`, `max`, ..."""

    function: str
    column: str | None = None
    by: str | None = None
    """The column that orders the rows, of first and last."""
    limit: int | None = None
    """How many values at most, of top_k and collect."""

    def __post_init__(self) -> None:
        for what, name in (("column", self.column), ("by", self.by)):
            if name is not None and not isinstance(name, str):
                raise FlowError(f"{self.function}: {what} is {name!r}, expected the name of a column, such as 'x'")

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


def variance(column: str) -> Aggregate:
    """Sample variance of a numeric column; null for fewer than two values. double."""
    return Aggregate("variance", column)


def stddev(column: str) -> Aggregate:
    """Sample standard deviation of a numeric column; null for fewer than two values. double."""
    return Aggregate("stddev", column)


def first(column: str, *, by: str) -> Aggregate:
    """The value of `column` in the row with the smallest `by` (of several: the smallest value, null if there is no other).

    Rows whose `by` is null are passed over.
    """
    return Aggregate("first", column, by=by)


def last(column: str, *, by: str) -> Aggregate:
    """The value of `column` in the row with the largest `by` (of several: the largest value, null if there is no other).

    Rows whose `by` is null are passed over.
    """
    return Aggregate("last", column, by=by)


def top_k(column: str, k: int) -> Aggregate:
    """The k largest values of a column, largest first, as a list."""
    return Aggregate("top_k", column, limit=_check_limit("top_k", k))


def collect(column: str, *, limit: int) -> Aggregate:
    """The values of a column in ascending order as a list, the smallest `limit` of them."""
    return Aggregate("collect", column, limit=_check_limit("collect", limit))


def _check_limit(function: str, limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIST:
        raise FlowError(f"{function}: {limit!r} is not a number of values from 1 to {MAX_LIST}")
    return limit


@dataclass(frozen=True)
class Accumulator:
    """A stored column: which columns it is made of, how input rows enter it, and how two of it combine."""

    name: str
    type: pa.DataType
    source: str | None
    how: str
    """`rows` (number of rows), `count` (non-null values), `sum`, `min`, `max`, `values` (the multiset), `mean` and `m2`, or
    `strange` (values that are not finite)."""
    fields: tuple[str, ...] = ()
    """Of `values`: the input columns that an entry holds, in the order that sorts them."""
    nulls: bool = False
    """Of `values`: whether entries whose first field is null count."""
    keep: int | None = None
    """Of `values`: how many entries are enough; None: all."""
    descending: bool = False
    """Of `values`: whether those to keep are the largest."""


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
        self._sums: dict[str, Sum] = {}
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
        hidden += [pa.field(name, type_) for sum_ in self._sums.values() for name, type_ in sum_.beside.items()]
        self.schema = pa.schema([*fields, *hidden])
        """What the stage's layers hold: key, outputs, then internal accumulators."""
        of_sums = [name for sum_ in self._sums.values() for name in sum_.beside]
        self.rare = frozenset([*of_sums, *(a.name for a in self.accumulators.values() if a.how == "strange")])
        """Columns that a layer has only where one of its rows has a value there, as versions before had none of them."""

    @property
    def sums(self) -> tuple[str, ...]:
        """The outputs that may be added up over keys."""
        return tuple(output for output, (a, _, _) in self._outputs.items() if a.function in ("count", "sum"))

    @property
    def is_over_all_rows(self) -> bool:
        """Whether there is one row, with or without rows in the input."""
        return self.key == (ALL_ROWS,)

    @classmethod
    def of_rows(cls, stage: str, key: Sequence[str], columns: Sequence[str], schema: pa.Schema) -> Plan:
        """One row per key of an input that changes: the smallest by contents of those that are there."""
        plan = cls(stage, key, {}, schema, retracts=True)
        for name in columns:
            _check_ordered(stage, Aggregate("field", name), schema.field(name).type)
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
                f"stage {stage}: {aggregate}: the input has no column {aggregate.column!r}; it has {', '.join(schema.names)}"
                f"{did_you_mean(aggregate.column, schema.names)}"
            )
        type_ = schema.field(aggregate.column).type
        if aggregate.function == "count":
            self._keep(output, Accumulator(output, pa.int64(), aggregate.column, "count"), aggregate)
        elif aggregate.function in _OF_VALUES or (self.retracts and aggregate.function in ("min", "max")):
            self._keep(output, self._values(stage, output, aggregate, schema), aggregate)
        elif aggregate.function in ("min", "max"):
            _check_ordered(stage, aggregate, type_)
            self._keep(output, Accumulator(output, type_, aggregate.column, aggregate.function), aggregate)
        elif aggregate.function in ("variance", "stddev"):
            _sum_type(stage, aggregate, type_)
            counted = f"__{output}_count"
            self.accumulators[counted] = Accumulator(counted, pa.int64(), aggregate.column, "count")
            mean = f"__{output}_mean"
            self.accumulators[mean] = Accumulator(mean, pa.float64(), aggregate.column, "mean")
            m2 = Accumulator(f"__{output}_m2", pa.float64(), aggregate.column, "m2")
            self._keep(output, m2, aggregate, counted)
            if self.retracts and pa.types.is_floating(type_):
                strange = _strange_of(m2)
                self.accumulators[strange] = Accumulator(strange, pa.int64(), aggregate.column, "strange")
        else:
            is_answer, sum_type = aggregate.function == "sum", _sum_type(stage, aggregate, type_)
            total = Accumulator(output if is_answer else f"__{output}_sum", sum_type, aggregate.column, "sum")
            self._sums[total.name] = sum_of(output, total.name, sum_type, retracts=self.retracts, is_answer=is_answer)
            counted = ""
            if self.retracts or aggregate.function == "mean":
                counted = f"__{output}_count"
                self.accumulators[counted] = Accumulator(counted, pa.int64(), aggregate.column, "count")
            self._keep(output, total, aggregate, counted)

    def _values(self, stage: str, output: str, aggregate: Aggregate, schema: pa.Schema) -> Accumulator:
        """The multiset that the aggregate is answered from."""
        assert aggregate.column is not None
        fields = (aggregate.column,) if aggregate.by is None else (aggregate.by, aggregate.column)
        for name in fields:
            if name not in schema.names:
                raise SchemaError(
                    f"stage {stage}: {aggregate}: the input has no column {name!r}; it has {', '.join(schema.names)}"
                    f"{did_you_mean(name, schema.names)}"
                )
            _check_ordered(stage, aggregate, schema.field(name).type)
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
        """One row of accumulators per key of `rows`, in order of (hash, key), and for each the row where it occurs first.

        `hashes` are of the key's columns, or of some of them and what tells others apart (`Groups.of`). `weights` is +1 for
        rows that came and -1 for rows that went; None: all came.
        """
        groups = Groups.of([as_array(rows.column(name)) for name in self.key], hashes)
        found: dict[str, pa.Array] = {}
        for accumulator in self.accumulators.values():
            if accumulator.how == "values":
                found[accumulator.name] = _summed(
                    _entries(rows, weights, groups, accumulator), len(groups), accumulator
                )
            elif accumulator.how == "m2":
                found |= _moments(rows, weights, groups, accumulator)
            elif accumulator.how == "sum":
                found |= self._sums[accumulator.name].of_groups(_source_of(rows, accumulator), weights, groups)
            elif accumulator.how == "strange":
                found[accumulator.name] = count_not_finite(_source_of(rows, accumulator), weights, groups)
            elif accumulator.how != "mean":
                found[accumulator.name] = _contributed(rows, weights, groups, accumulator)
        keys = {name: take(as_array(rows.column(name)), groups.first) for name in self.key}
        return pa.table(keys | found), groups.first

    def combine(self, partial: pa.Table, before: pa.Table) -> pa.Table:
        """New accumulators: `partial` with `before` (same keys in the same rows; null where a key is new).

        `before` is as layers have it, and what this returns, as `partial`, in the wide form of sums (nosync.kernels.sums).
        """
        columns = {name: partial.column(name) for name in self.key}
        for accumulator in self.accumulators.values():
            if accumulator.how == "sum":
                sum_ = self._sums[accumulator.name]
                columns |= sum_.added(_wide(sum_, partial), sum_.widened(before))
            elif accumulator.how == "m2":
                columns[_mean_of(accumulator)], columns[accumulator.name] = _combined_moments(
                    partial, before, accumulator
                )
            elif accumulator.how != "mean":
                new, old = partial.column(accumulator.name), before.column(accumulator.name)
                columns[accumulator.name] = _combined(new, old, accumulator)
        return pa.table(columns)

    def finish(self, accumulators: pa.Table) -> pa.Table:
        """The rows that the layer stores: key, outputs, internal accumulators (`schema`).

        Raises OverflowError where a sum is beyond the type that it has in the output.
        """
        columns = {name: accumulators.column(name) for name in accumulators.column_names}
        for output, (aggregate, total, counted) in self._outputs.items():
            if self.accumulators[total].how == "values":
                columns[output] = _answer(aggregate, columns[total], self.accumulators[total])
            elif aggregate.function == "mean":
                # Null where nothing was counted: dividing by zero would give NaN.
                n = columns[counted]
                n = pc.if_else(pc.greater(n, 0), n, None)
                sum_ = self._sums[total]
                columns[output] = pc.divide(sum_.doubles(_wide(sum_, accumulators)), _as_doubles(as_array(n)))
                columns |= sum_.recorded(_wide(sum_, accumulators))
            elif aggregate.function in ("variance", "stddev"):
                columns[output] = self._spread(aggregate, accumulators, total, counted)
            elif aggregate.function == "sum":
                columns |= self._sum(output, aggregate, accumulators)
                if counted:
                    columns[output] = pc.if_else(pc.greater(columns[counted], 0), columns[total], None)
        return pa.Table.from_arrays([columns[f.name].cast(f.type) for f in self.schema], schema=self.schema)

    def _spread(self, aggregate: Aggregate, accumulators: pa.Table, total: str, counted: str) -> pa.Array:
        """Null for fewer than two values, and NaN where one of them is not finite."""
        n = as_array(accumulators.column(counted))
        n = pc.if_else(pc.greater(n, 1), pc.subtract(n, 1), None)
        found = pc.divide(as_array(accumulators.column(total)), n.cast(pa.float64()))
        strange = _strange_of(self.accumulators[total])
        if strange in self.accumulators:
            is_strange = accumulators.column(strange).is_valid()
            found = pc.if_else(pc.and_(as_array(is_strange), n.is_valid()), pa.scalar(np.nan), found)
        return pc.sqrt(found) if aggregate.function == "stddev" else found

    def _sum(self, output: str, aggregate: Aggregate, accumulators: pa.Table) -> dict[str, pa.Array]:
        sum_ = self._sums[output]
        try:
            return sum_.recorded(_wide(sum_, accumulators))
        except DoesNotFitError as error:
            key = accumulators.select(list(self.key)).slice(error.row, 1).to_pylist()[0]
            whose = "all rows" if self.is_over_all_rows else f"key {key}"
            column = aggregate.column
            raise OverflowError(
                f"{output}, {aggregate}, of {whose} is {error.value}, beyond {error.beyond}: cast {column!r} before, as "
                f'select(..., "CAST({column} AS {error.cast}) AS {column}") does'
            ) from None


def _wide(sum_: Sum, accumulators: pa.Table) -> dict[str, pa.Array]:
    return {name: as_array(accumulators.column(name)) for name in sum_.memory}


def _combined(new: pa.ChunkedArray, old: pa.ChunkedArray, accumulator: Accumulator) -> pa.Array | pa.ChunkedArray:
    if accumulator.how == "values":
        return _merge_values(new, old, accumulator)
    if accumulator.how in ("min", "max"):
        return _extreme(new, old, accumulator.how)
    if accumulator.how == "strange":
        return counts_added(as_array(new), as_array(old))
    # A side that is null adds nothing; both null stay null, as a SQL sum of no values.
    return pc.coalesce(pc.add_checked(new, old), new, old)


def _sum_type(stage: str, aggregate: Aggregate, type_: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    if pa.types.is_decimal(type_):
        return pa.decimal128(38, type_.scale)
    raise SchemaError(f"stage {stage}: {aggregate}: column {aggregate.column!r} is {type_}, expected a number")


def _contributed(rows: pa.Table, weights: pa.Array | None, groups: Groups, accumulator: Accumulator) -> pa.Array:
    """What each group's rows add to an accumulator."""
    column = None if accumulator.source is None else as_array(rows.column(accumulator.source))
    if accumulator.how in ("min", "max"):
        return groups.reduce(column, accumulator.how)
    if weights is None and (column is None or not column.null_count):
        return pa.array(groups.sizes)
    counted = (
        pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows) if column is None else pc.is_valid(column).cast(pa.int64())
    )
    return groups.reduce(counted if weights is None else pc.multiply(counted, weights), SUM)


def _source_of(rows: pa.Table, accumulator: Accumulator) -> pa.Array:
    assert accumulator.source is not None, f"{accumulator.how} is of a column"
    return as_array(rows.column(accumulator.source))


def _extreme(a: pa.ChunkedArray, b: pa.ChunkedArray, how: str) -> pa.ChunkedArray:
    """The smaller or the larger of two values. Arrow compares no booleans, and no timestamps that have a time zone, so."""
    type_ = a.type
    if pa.types.is_boolean(type_):
        a, b = a.cast(pa.int8()), b.cast(pa.int8())
    elif pa.types.is_timestamp(type_):
        a, b = a.cast(pa.int64()), b.cast(pa.int64())
    function = pc.min_element_wise if how == "min" else pc.max_element_wise
    return function(a, b, skip_nulls=True).cast(type_)


_OF_VALUES = frozenset({"count_distinct", "first", "last", "top_k", "collect"})


def values_type(types: Sequence[pa.DataType]) -> pa.DataType:
    """How a multiset is stored: its different entries in order (`value`, or `value0`, ...), and how often each occurs."""
    return pa.list_(pa.struct([*(pa.field(f"v{i}", t) for i, t in enumerate(types)), pa.field("n", pa.int64())]))


def _output_type(aggregate: Aggregate, accumulator: Accumulator) -> pa.DataType:
    if aggregate.function in ("mean", "variance", "stddev"):
        return pa.float64()
    if aggregate.function == "count_distinct":
        return pa.int64()
    if accumulator.how != "values":
        return accumulator.type
    answer = accumulator.type.value_type.field(len(accumulator.fields) - 1).type
    return pa.list_(answer) if aggregate.function in ("top_k", "collect") else answer


def _check_ordered(stage: str, aggregate: Aggregate, type_: pa.DataType) -> None:
    if pa.types.is_nested(type_) or pa.types.is_null(type_):
        raise SchemaError(
            f"stage {stage}: {aggregate}: column {aggregate.column!r} is {type_}, whose values have no order"
        )


# --- multisets -------------------------------------------------------------------------------------------------------


def _entries(rows: pa.Table, weights: pa.Array | None, groups: Groups, accumulator: Accumulator) -> pa.Table:
    """An entry for each input row: `row` (its group's number), v0, v1, ..., n."""
    columns = {"row": pa.array(groups.numbers)}
    for i, name in enumerate(accumulator.fields):
        columns[f"v{i}"] = take(as_array(rows.column(name)), groups.order)
    ones = pa.repeat(pa.scalar(1, pa.int64()), len(groups.order)) if weights is None else take(weights, groups.order)
    return pa.table({**columns, "n": ones})


def _stored_entries(lists: pa.Array) -> pa.Table:
    """The entries of a column of multisets, as `_entries` gives them."""
    entries = lists.flatten()
    columns = {f.name: entries.field(f.name) for f in lists.type.value_type}
    return pa.table({"row": pc.list_parent_indices(lists).cast(pa.int64()), **columns})


def _summed(entries: pa.Table, rows: int, accumulator: Accumulator) -> pa.ListArray:
    """The multisets of `rows` rows: equal entries added up, those of number 0 left out, in order, cut to what is kept."""
    names = entries.column_names[1:-1]
    if not accumulator.nulls:
        entries = entries.filter(pc.is_valid(entries[names[0]]))
    summed = entries.group_by(["row", *names], use_threads=False).aggregate([("n", "sum")])
    summed = summed.filter(pc.not_equal(summed["n_sum"], 0))
    by = ["row", *names]
    if accumulator.descending and len(names) > 1:  # of equal `by`, null is the value only where there is no other
        summed = summed.append_column("valid", pc.is_valid(summed[names[-1]]).cast(pa.int8()))
        by.insert(-1, "valid")
    summed = summed.sort_by([(name, "ascending") for name in by])
    row = summed["row"].to_numpy()
    lengths = np.bincount(row, minlength=rows)
    if accumulator.keep is not None and len(row) and lengths.max() > accumulator.keep:
        ends = np.cumsum(lengths)
        at = np.arange(len(row))
        place = (ends[row] - 1 - at) if accumulator.descending else at - (ends - lengths)[row]
        summed = summed.filter(pa.array(place < accumulator.keep))
        lengths = np.minimum(lengths, accumulator.keep)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    columns = [as_array(summed[name]) for name in names] + [as_array(summed["n_sum"])]
    entries_of = pa.StructArray.from_arrays(columns, fields=list(accumulator.type.value_type))
    return pa.ListArray.from_arrays(offsets, entries_of, type=accumulator.type)


def _merge_values(new: pa.ChunkedArray, old: pa.ChunkedArray, accumulator: Accumulator) -> pa.Array:
    """The multisets of `old` with the entries of `new` added (or taken out, where their number is negative)."""
    parts = [_stored_entries(as_array(column).cast(accumulator.type)) for column in (old, new)]
    return _summed(pa.concat_tables(parts), len(new), accumulator)


def _answer(aggregate: Aggregate, values: pa.ChunkedArray, accumulator: Accumulator) -> pa.Array:
    """What an aggregate says of each multiset."""
    lists = as_array(values)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    if aggregate.function == "count_distinct":
        return pa.array(lengths - _equal_neighbours(lists), pa.int64())
    if aggregate.limit is not None:
        return _expanded(lists, aggregate.limit, descending=accumulator.descending)
    ends = np.cumsum(lengths)
    at = ends - lengths if aggregate.function in ("min", "first", "field") else ends - 1
    field = accumulator.fields.index(aggregate.column) if aggregate.function == "field" else len(accumulator.fields) - 1
    answers = lists.flatten().field(field)
    return answers.take(pa.array(at, mask=lengths == 0))


def _equal_neighbours(lists: pa.ListArray) -> Indices:
    """How many entries of each multiset equal the one before it: 0.0 and -0.0, and NaN of other bits, are two entries, and one
    value, as in Spark.
    """
    none = np.zeros(len(lists), dtype=np.int64)
    if not pa.types.is_floating(lists.type.value_type.field(0).type):
        return none
    entries = _stored_entries(lists)
    row, value = entries["row"].to_numpy(), entries["v0"].to_numpy()
    same = (value[1:] == value[:-1]) | (np.isnan(value[1:]) & np.isnan(value[:-1]))
    equal = (row[1:] == row[:-1]) & same
    return np.bincount(row[1:][equal], minlength=len(lists)) if equal.any() else none


def _expanded(lists: pa.ListArray, limit: int, *, descending: bool) -> pa.ListArray:
    """Each multiset as a list with every value as often as it occurs, cut at `limit`."""
    entries = _stored_entries(lists)
    if descending:  # the other way round, as Arrow puts NaN, the largest, last in either order
        entries = entries.sort_by([("row", "ascending"), ("v0", "ascending")])
        backwards = np.arange(entries.num_rows)[::-1]
        rows = entries["row"].to_numpy()[backwards]
        entries = entries.take(pa.array(backwards[np.argsort(rows, kind="stable")]))
    repeats = np.minimum(entries["n"].to_numpy(), limit)
    row = np.repeat(entries["row"].to_numpy(), repeats)
    values = as_array(entries["v0"]).take(pa.array(np.repeat(np.arange(len(repeats)), repeats)))
    lengths = np.bincount(row, minlength=len(lists))
    place = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]
    values = values.filter(pa.array(place < limit))
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, limit))])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


# --- variance --------------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore")  # NaN and infinities make what they are in NaN, as in Spark
def _moments(rows: pa.Table, weights: pa.Array | None, groups: Groups, m2: Accumulator) -> dict[str, pa.Array]:
    """Of each group (came, went): mean and m2 as lists of two, beside the count that other code keeps."""
    assert m2.source is not None, "a variance is of a column"
    x = _as_doubles(take(as_array(rows.column(m2.source)), groups.order))
    valid = x.is_valid().to_numpy(zero_copy_only=False)
    went = np.zeros(len(valid), np.bool_) if weights is None else np.take(weights.to_numpy(), groups.order) < 0
    values = x.fill_null(0.0).to_numpy(zero_copy_only=False)
    if weights is not None:
        valid &= np.isfinite(values)  # the others are counted: they could not be taken back
    found = []
    for chosen in (valid & ~went, valid & went):
        group = groups.numbers[chosen]
        n = np.bincount(group, minlength=len(groups))
        mean = np.bincount(group, values[chosen], minlength=len(groups)) / np.maximum(n, 1)
        spread = (values[chosen] - mean[group]) ** 2
        found.append((n.astype(np.float64), mean, np.bincount(group, spread, minlength=len(groups))))
    parts = np.stack([column for part in found for column in part], axis=1)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(parts.ravel()), 6)
    return {m2.name: lists, _mean_of(m2): pa.nulls(len(groups), pa.float64())}


def _mean_of(m2: Accumulator) -> str:
    return m2.name.removesuffix("_m2") + "_mean"


def _strange_of(m2: Accumulator) -> str:
    return m2.name.removesuffix("_m2") + "_strange"


@np.errstate(invalid="ignore")
def _combined_moments(partial: pa.Table, before: pa.Table, m2: Accumulator) -> tuple[pa.Array, pa.Array]:
    """Mean and m2 of the rows before, with those that came and without those that went."""
    n, mean, spread = _kept_moments(before, m2)
    lists = as_array(partial.column(m2.name))
    if pa.types.is_fixed_size_list(lists.type):
        parts = lists.flatten().to_numpy().reshape(-1, 6)
        steps = [(1, parts[:, :3].T), (-1, parts[:, 3:].T)]
    else:  # combined before
        steps = [(1, np.stack(_kept_moments(partial, m2)))]
    for sign, (n1, mean1, spread1) in steps:
        total = n + sign * n1
        safe = np.maximum(total, 1)
        new_mean = np.where(total > 0, (n * mean + sign * n1 * mean1) / safe, 0.0)
        # Adding: delta^2 n n1 / total. Taking out is the same formula solved for the rest.
        if sign > 0:
            delta = np.where(np.isinf(mean1 - mean), np.nan, mean1 - mean)
            spread = spread + spread1 + delta**2 * n * n1 / safe
        else:
            rest = spread - spread1 - (mean1 - new_mean) ** 2 * total * n1 / np.maximum(n, 1)
            spread = np.where(rest < _NOISE * spread, 0.0, rest)
        spread = np.where(total > 1, np.maximum(spread, 0.0), 0.0)
        n, mean = total, new_mean
    return pa.array(mean), pa.array(spread)


def _kept_moments(rows: pa.Table, m2: Accumulator) -> list[npt.NDArray[np.float64]]:
    """Number, mean and m2 of the values; where others are counted, of those that are finite."""
    counted, strange = m2.name.removesuffix("_m2") + "_count", _strange_of(m2)
    n, mean, spread = (_doubles(rows.column(name)) for name in (counted, _mean_of(m2), m2.name))
    return [n - _doubles(rows.column(strange)) if strange in rows.column_names else n, mean, spread]


def _as_doubles(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The nearest ones: a mean of ids or of times in milliseconds is beyond what doubles have exactly."""
    return column.cast(pa.float64(), safe=False)


def _doubles(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = _as_doubles(as_array(column)).fill_null(0.0).to_numpy(zero_copy_only=False)
    return values
