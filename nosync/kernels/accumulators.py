"""Accumulators: the columns that aggregates keep in a stage's layer, how rows enter them, and how two of them combine.

Accumulators follow an input that changes, so rows can be taken out of them again. `min`, `max`, `first`, `last`,
`top_k`, `collect` and `count_distinct` need all values for that: they keep, per key, the sorted multiset of values as a
list of (value, how often). It is rewritten for the keys that an epoch touches, so it suits keys with up to some ten
thousand different values. Over an input that only grows, no more is kept than the answer needs.

`variance` and `stddev` keep (count, mean, sum of squared differences from the mean), combined by the formula of Chan,
Golub and LeVeque (1979), which does not lose digits when the mean is large. Over rows that change they are of the
finite values, and beside them is how many are not. `nosync.kernels.sums` says how sums are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.aggregates import Aggregate
from nosync.kernels.groups import SUM, Groups, floats_of, is_float, ordered_floats
from nosync.kernels.sums import counts_added
from nosync.lsm.columnar.columns import Indices, as_array, take
from nosync.lsm.errors import SchemaError

_NOISE = 32 * np.finfo(np.float64).eps
"""A spread that others were taken out of is rounding if it is below this share, as where all that is left is equal."""
OF_VALUES = frozenset({"count_distinct", "first", "last", "top_k", "collect"})
"""The functions that keep a multiset of values, whatever their input."""


@dataclass(frozen=True)
class Accumulator:
    """A stored column: which columns it is made of, how input rows enter it, and how two of it combine."""

    name: str
    type: pa.DataType
    source: str | None
    how: str
    """The kind: `rows` (number of rows), `count` (non-null values), `sum`, `min`, `max`, `values` (the multiset),
    `mean` and `m2`, or `strange` (values that are not finite).
    """
    fields: tuple[str, ...] = ()
    """The input columns that an entry of `values` holds, in the order that sorts them."""
    nulls: bool = False
    """Says whether entries of `values` count whose first field is null."""
    keep: int | None = None
    """The number of entries of `values` that are enough. None: all are kept."""
    descending: bool = False
    """Says whether the entries of `values` to keep are the largest."""


# --- types ------------------------------------------------------------------------------------------------------------


def values_type(types: Sequence[pa.DataType]) -> pa.DataType:
    """Returns the type of a stored multiset: its different entries in order (`v0`, `v1`, ...), and how often each is in
    it.
    """
    return pa.list_(pa.struct([*(pa.field(f"v{i}", t) for i, t in enumerate(types)), pa.field("n", pa.int64())]))


def sum_type(stage: str, aggregate: Aggregate, type_: pa.DataType) -> pa.DataType:
    """Returns the type of a column's sum. Raises SchemaError for a column that is no number."""
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    if pa.types.is_decimal(type_):
        return pa.decimal128(38, type_.scale)
    raise SchemaError(f"stage {stage}: {aggregate}: column {aggregate.column!r} is {type_}, expected a number")


def output_type(aggregate: Aggregate, accumulator: Accumulator) -> pa.DataType:
    """Returns the type of what an aggregate says."""
    if aggregate.function in ("mean", "variance", "stddev"):
        return pa.float64()
    if aggregate.function == "count_distinct":
        return pa.int64()
    if accumulator.how != "values":
        return accumulator.type
    value = accumulator.type.value_type.field(len(accumulator.fields) - 1).type
    return pa.list_(value) if aggregate.function in ("top_k", "collect") else value


def check_ordered(stage: str, aggregate: Aggregate, type_: pa.DataType) -> None:
    """Raises SchemaError for a column whose values have no order."""
    if pa.types.is_nested(type_) or pa.types.is_null(type_):
        raise SchemaError(
            f"stage {stage}: {aggregate}: column {aggregate.column!r} is {type_}, whose values have no order"
        )


# --- one value for each key -------------------------------------------------------------------------------------------


def source_of(rows: pa.Table, accumulator: Accumulator) -> pa.Array:
    """Returns the column of which an accumulator is made."""
    assert accumulator.source is not None, f"{accumulator.how} is of a column"
    return as_array(rows.column(accumulator.source))


def contributed(rows: pa.Table, weights: pa.Array | None, groups: Groups, accumulator: Accumulator) -> pa.Array:
    """Returns what each group's rows add to an accumulator."""
    column = None if accumulator.source is None else as_array(rows.column(accumulator.source))
    if accumulator.how in ("min", "max"):
        return groups.reduce(column, accumulator.how)
    if weights is None and (column is None or not column.null_count):
        return pa.array(groups.sizes)
    counted = (
        pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows) if column is None else pc.is_valid(column).cast(pa.int64())
    )
    return groups.reduce(counted if weights is None else pc.multiply(counted, weights), SUM)


def combined(new: pa.ChunkedArray, old: pa.ChunkedArray, accumulator: Accumulator) -> pa.Array | pa.ChunkedArray:
    """Returns what two of an accumulator make together, where its column alone says it."""
    if accumulator.how == "values":
        return _merge_values(new, old, accumulator)
    if accumulator.how in ("min", "max"):
        return _extreme(new, old, accumulator.how)
    if accumulator.how == "strange":
        return counts_added(as_array(new), as_array(old))
    # A side that is null adds nothing; both null stay null, as a SQL sum of no values.
    return pc.coalesce(pc.add_checked(new, old), new, old)


def _extreme(a: pa.ChunkedArray, b: pa.ChunkedArray, how: str) -> pa.ChunkedArray:
    """Returns the smaller or the larger of two values. Arrow itself compares no booleans, and no timestamps with a
    zone, and passes over NaN.
    """
    type_, function = a.type, pc.min_element_wise if how == "min" else pc.max_element_wise
    if is_float(type_):
        ordered = function(ordered_floats(as_array(a)), ordered_floats(as_array(b)), skip_nulls=True)
        return pa.chunked_array([floats_of(ordered, type_)])
    if pa.types.is_boolean(type_):
        a, b = a.cast(pa.int8()), b.cast(pa.int8())
    elif pa.types.is_timestamp(type_):
        a, b = a.cast(pa.int64()), b.cast(pa.int64())
    return function(a, b, skip_nulls=True).cast(type_)


# --- multisets --------------------------------------------------------------------------------------------------------


def entries_of(rows: pa.Table, weights: pa.Array | None, groups: Groups, accumulator: Accumulator) -> pa.Table:
    """Returns an entry for each input row: `row` (its group's number), v0, v1, ..., n."""
    columns = {"row": pa.array(groups.numbers)}
    for i, name in enumerate(accumulator.fields):
        columns[f"v{i}"] = take(as_array(rows.column(name)), groups.order)
    ones = pa.repeat(pa.scalar(1, pa.int64()), len(groups.order)) if weights is None else take(weights, groups.order)
    return pa.table({**columns, "n": ones})


def _stored_entries(lists: pa.Array) -> pa.Table:
    """Returns the entries of a column of multisets, as `entries_of` gives them."""
    entries = lists.flatten()
    columns = {f.name: entries.field(f.name) for f in lists.type.value_type}
    return pa.table({"row": pc.list_parent_indices(lists).cast(pa.int64()), **columns})


def multisets(entries: pa.Table, rows: int, accumulator: Accumulator) -> pa.ListArray:
    """Returns the multisets of so many rows: equal entries are added up, those of number 0 left out, in order, cut to
    what is kept.
    """
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
    structs = pa.StructArray.from_arrays(columns, fields=list(accumulator.type.value_type))
    return pa.ListArray.from_arrays(offsets, structs, type=accumulator.type)


def _merge_values(new: pa.ChunkedArray, old: pa.ChunkedArray, accumulator: Accumulator) -> pa.Array:
    """Returns the multisets of `old` with the entries of `new` added (or taken out, where their number is negative)."""
    parts = [_stored_entries(as_array(column).cast(accumulator.type)) for column in (old, new)]
    return multisets(pa.concat_tables(parts), len(new), accumulator)


def answer(aggregate: Aggregate, values: pa.ChunkedArray, accumulator: Accumulator) -> pa.Array:
    """Returns what an aggregate says of each multiset."""
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
    """Returns how many entries of each multiset equal the one before it.

    0.0 and -0.0, and NaN of other bits, are two entries and, as in Spark, one value.
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
    """Returns each multiset as a list with every value as often as it occurs, cut at `limit`."""
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


# --- variance ---------------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore")  # NaN and infinities make what they are in NaN, as in Spark
def moments(rows: pa.Table, weights: pa.Array | None, groups: Groups, m2: Accumulator) -> dict[str, pa.Array]:
    """Returns for each group the count, mean and m2 of the values that came, and of those that went, in one list of
    six.
    """
    assert m2.source is not None, "a variance is of a column"
    x = as_doubles(take(as_array(rows.column(m2.source)), groups.order))
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
    return {m2.name: lists, mean_of(m2): pa.nulls(len(groups), pa.float64())}


def mean_of(m2: Accumulator) -> str:
    """Returns the name of the accumulator that has the mean, beside that of a variance."""
    return m2.name.removesuffix("_m2") + "_mean"


def strange_of(m2: Accumulator) -> str:
    """Returns the name of the accumulator that counts values that are not finite, beside that of a variance."""
    return m2.name.removesuffix("_m2") + "_strange"


@np.errstate(invalid="ignore")
def combined_moments(partial: pa.Table, before: pa.Table, m2: Accumulator) -> tuple[pa.Array, pa.Array]:
    """Returns mean and m2 of the rows before, with those that came and without those that went."""
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
    """Returns the number, mean and m2 of the values. Where those that are not finite are counted, they are left out."""
    counted, strange = m2.name.removesuffix("_m2") + "_count", strange_of(m2)
    n, mean, spread = (_doubles(rows.column(name)) for name in (counted, mean_of(m2), m2.name))
    return [n - _doubles(rows.column(strange)) if strange in rows.column_names else n, mean, spread]


def as_doubles(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns the nearest doubles: a mean of ids or of times in milliseconds is beyond what doubles have exactly."""
    return column.cast(pa.float64(), safe=False)


def _doubles(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = as_doubles(as_array(column)).fill_null(0.0).to_numpy(zero_copy_only=False)
    return values
