"""Comparing two branches: keys with both sides, what changed in total, and where the two began to differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from nosync.flow.bound_stage import BoundStage
from nosync.kernels.aggregate_plan import ALL_ROWS
from nosync.lsm.columnar.table_diff import CHANGE, CHANGED, ONLY_A, ONLY_B, is_number, show_key
from nosync.lsm.errors import FlowError, InvalidInputError
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.platform.notebook import facts_html, rows_html
from nosync.lsm.visible import visible
from nosync.spark.expressions import quoted
from nosync.spark.maps import comparable, without_maps

_COUNT, _COUNTED = "n", "n?"
"""How often a row is there; the second name is no column's."""


class Side(Protocol):
    """Is what is compared: a job, on its branch."""

    def read(self, stage: str, as_of: AsOf | None = None) -> DataFrame:
        """Returns the state of a stage as of an epoch."""

    def changes(self, stage: str, after: AsOf, until: AsOf) -> DataFrame:
        """Returns the change feed of a stage."""

    def stage(self, name: str, as_of: int | None = None) -> BoundStage:
        """Returns a stage with its schemas, as they are, or as they were at an epoch."""

    def sums_of(self, stage: str) -> tuple[str, ...]:
        """Returns the columns of a stage that may be added up."""

    def last_sealed(self) -> int | None:
        """Returns the newest epoch."""

    def range_of(self, after: AsOf, until: AsOf) -> tuple[int, int]:
        """Returns the epochs between which changes are asked for."""

    def epoch_as_of(self, as_of: AsOf) -> int:
        """Returns the epoch that a number, or a time of the wall clock, stands for."""

    def shared_until(self, other: Any, stage: str) -> int:
        """Returns the last epoch up to which a stage's layers are the same files on another branch."""


@dataclass(frozen=True)
class ColumnDiff:
    """Describes a numeric column on both sides, and the differences (b - a) of the keys that changed.

    Of counts and sums the totals over all rows, where a key that one side lacks counts as 0. Other values, such as
    means and minima, cannot be added up: of these the medians, and the differences of keys that both sides have.
    """

    total_a: float | None
    total_b: float | None
    median_a: float | None
    median_b: float | None
    median_difference: float | None
    largest_difference: float | None

    @property
    def adds_up(self) -> bool:
        return self.total_a is not None

    @property
    def both(self) -> tuple[float | None, float | None]:
        """Returns the two totals, or the two medians."""
        return (self.total_a, self.total_b) if self.adds_up else (self.median_a, self.median_b)


@dataclass(frozen=True)
class DiffSummary:
    """Says how two states differ."""

    stage: str
    as_of: int
    only_a: int
    only_b: int
    changed: int
    columns: dict[str, ColumnDiff]

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.changed)

    def _repr_html_(self) -> str:
        facts = {"changed": self.changed, "only in a": self.only_a, "only in b": self.only_b}
        rows = [
            (n, "total" if c.adds_up else "median", *c.both, c.median_difference, c.largest_difference)
            for n, c in self.columns.items()
        ]
        table = rows_html(["column", "", "a", "b", "median difference", "largest difference"], rows)
        return facts_html(f"stage {self.stage} as of {self.as_of}", facts, table)

    def __str__(self) -> str:
        lines = [
            f"stage {self.stage} as of {self.as_of}: {self.changed} keys changed, {self.only_a} only in a, "
            f"{self.only_b} only in b"
        ]
        for name, c in self.columns.items():
            kind = "total" if c.adds_up else "median"
            (of_a, of_b), differences = c.both, (c.median_difference, c.largest_difference)
            shown = [f"{kind} a {_text(of_a)}", f"{kind} b {_text(of_b)}"]
            shown += [
                f"{which} difference {_text(d)}" for which, d in zip(("median", "largest"), differences, strict=True)
            ]
            lines.append(f"  {name:<16} " + "   ".join(shown))
        return "\n".join(map(visible, lines))


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6g}"


def diff(a: Side, b: Side, stage: str, as_of: AsOf | None = None) -> DataFrame:
    """Returns the keys whose rows differ between two jobs (branches) as of an epoch (default: the newest that both
    have). A time of the wall clock is looked up on `a`.

    Columns: the key, `_diff` (only_a, only_b, changed), then each value column twice, as `<column>_a` and `<column>_b`.
    For a stage without a key: the rows that one side has more often, with how often as `n_a` and `n_b`.
    """
    t = _epoch(a, b, as_of)
    key, values, keyed = _columns(a, b, stage, t)
    compared = values if keyed else [_COUNT]
    clash = [f"{v}_{side}" for v in compared for side in "ab" if f"{v}_{side}" in key]
    if clash:
        raise FlowError(
            f"stage {stage}: {clash[0]!r} is a column of its key, and the name that a value would have here: rename one, or use "
            "diff_summary()"
        )
    found = _differences(a, b, stage, t)
    shown = [F.col(quoted(f"{side};{v}")).alias(f"{v}_{side}") for v in compared for side in "ab"]
    return found.select(*(F.col(quoted(k)) for k in key), CHANGE, *shown)


def _differences(a: Side, b: Side, stage: str, as_of: int) -> DataFrame:
    """Returns what `diff` returns, with values under names that no column has: `a;x` and `b;x`."""
    key, values, keyed = _columns(a, b, stage, as_of)
    sides = []
    for job, side in ((a, "a"), (b, "b")):
        rows = job.read(stage, as_of=as_of)
        if keyed and not job.stage(stage, as_of).keyed:
            _check_unique(rows, key, f"stage {stage}")
        if not keyed:
            rows = rows.groupBy(*(F.col(quoted(k)) for k in key)).agg(F.count(F.lit(1)).alias(_COUNTED))
        named = [F.col(quoted(k)).alias(f"{side}:{k}") for k in key]
        named += [F.col(quoted(v)).alias(f"{side};{v}") for v in values]
        named += [] if keyed else [F.col(quoted(_COUNTED)).alias(f"{side};{_COUNT}")]
        sides.append(rows.select(*named, F.lit(True).alias(f"{side}?")))
    same_key = reduce(
        lambda x, y: x & y, [F.col(quoted(f"a:{k}")).eqNullSafe(F.col(quoted(f"b:{k}"))) for k in key], F.lit(True)
    )
    joined = sides[0].join(sides[1], same_key, "full")
    in_a, in_b = F.col("`a?`").isNotNull(), F.col("`b?`").isNotNull()
    compared = values if keyed else [_COUNT]
    both = [(F.col(quoted(f"a;{v}")), F.col(quoted(f"b;{v}"))) for v in compared]
    types = {f.name: f.dataType for f in joined.schema}
    same = [
        comparable(x, types[f"a;{v}"]).eqNullSafe(comparable(y, types[f"b;{v}"]))
        for v, (x, y) in zip(compared, both, strict=True)
    ]
    differs: Column = reduce(or_, [~one for one in same], F.lit(False))
    kind = F.when(~in_b, ONLY_A).when(~in_a, ONLY_B).otherwise(CHANGED)
    keys = [F.coalesce(F.col(quoted(f"a:{k}")), F.col(quoted(f"b:{k}"))).alias(k) for k in key]
    values_of_both = [c for pair in both for c in pair]
    return joined.where(~in_a | ~in_b | differs).select(*keys, kind.alias(CHANGE), *values_of_both)


def diff_changes(a: Side, b: Side, stage: str, after: AsOf, until: AsOf) -> DataFrame:
    """Compares the change feeds of two branches over a range of epochs. Returns the rows that only one has, with
    `_side` a or b. Times of the wall clock are looked up on `a`.
    """
    _check_sides(a, b)
    after, until = a.range_of(after, until)
    schemas = [job.stage(stage, until).output for job in (a, b)]
    if schemas[0].names != schemas[1].names:
        raise FlowError(
            f"stage {stage} has columns {', '.join(schemas[0].names)} on one side and {', '.join(schemas[1].names)} on the "
            "other: their changes cannot be matched; diff() compares the columns that both have, as of an epoch"
        )
    _check_types(a.stage(stage, until), b.stage(stage, until), schemas[0].names)
    left, right = a.changes(stage, after, until), b.changes(stage, after, until)
    (left, with_maps), (right, _) = without_maps(left), without_maps(right)
    only_a, only_b = left.exceptAll(right), right.exceptAll(left)
    found = only_a.withColumn("_side", F.lit("a")).unionByName(only_b.withColumn("_side", F.lit("b")))
    return with_maps(found)


def summarize(a: Side, b: Side, stage: str, as_of: AsOf | None = None) -> DiffSummary:
    """Counts the keys that differ, and how; for each numeric column it returns the totals or medians, and the
    differences.
    """
    t = _epoch(a, b, as_of)
    _, values, _ = _columns(a, b, stage, t)
    found = _differences(a, b, stage, t).cache()
    try:
        counts = {row[CHANGE]: row["count"] for row in found.groupBy(CHANGE).count().collect()}
        schema = a.stage(stage, t).output
        numeric = [v for v in values if is_number(schema.field(v).type)]
        sums = set(a.sums_of(stage)) & set(b.sums_of(stage))
        columns = {name: _column_diff(a, b, stage, t, found, name, adds_up=name in sums) for name in numeric}
    finally:
        found.unpersist()
    return DiffSummary(
        stage, t, counts.get(ONLY_A, 0), counts.get(ONLY_B, 0), counts.get(CHANGED, 0), columns
    )  # fmt: skip


def _column_diff(a: Side, b: Side, stage: str, as_of: int, found: DataFrame, name: str, *, adds_up: bool) -> ColumnDiff:
    # As doubles, which is what is said of them: sums of large whole numbers would overflow.
    column = F.col(quoted(name)).cast("double")
    statistic = F.coalesce(F.sum(column), F.lit(0.0)) if adds_up else F.median(column)
    both = [job.read(stage, as_of=as_of).agg(statistic).collect()[0][0] for job in (a, b)]
    sides = [F.col(quoted(f"{side};{name}")).cast("double") for side in "ab"]
    change = reduce(lambda x, y: y - x, [F.coalesce(side, F.lit(0.0)) if adds_up else side for side in sides])
    median, low, high = found.agg(F.median(change), F.min(change), F.max(change)).collect()[0]
    largest = max((d for d in (low, high) if d is not None), key=abs, default=None)
    of_a, of_b = both
    if adds_up:
        return ColumnDiff(of_a, of_b, None, None, median, largest)
    return ColumnDiff(None, None, of_a, of_b, median, largest)


def diverges_at(a: Side, b: Side, stage: str) -> int | None:
    """Returns the first epoch whose changes of a stage differ between two branches; None where they agree as far as
    both go.

    Bisection over what manifests say: an epoch whose layers are the same files needs no reading, and neither do all
    epochs before it. Where the code differs the contents are compared, from the last epoch that is shared on.
    """
    _check_sides(a, b)
    last = _newest_of_both(a, b)
    first = a.shared_until(b, stage)
    shapes = [(job.stage(stage).key, job.stage(stage).output) for job in (a, b)]
    if shapes[0] != shapes[1]:  # all that one has after the fork is another row
        return first + 1 if first < last else None
    low, high = first, last  # the feeds agree up to low
    if diff_changes(a, b, stage, low, high).isEmpty():
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if diff_changes(a, b, stage, low, middle).isEmpty():
            low = middle
        else:
            high = middle
    return high


def _columns(a: Side, b: Side, stage: str, as_of: int) -> tuple[list[str], list[str], bool]:
    """Returns the key and the value columns that both sides have, and whether rows are matched by that key; if not, equal
    rows are counted. Where one side has no key, that of the other is it. Raises FlowError where they cannot be compared.
    """
    left, right = (job.stage(stage, as_of) for job in (a, b))
    wanted = left.key or right.key
    key = [name for name in wanted if name != ALL_ROWS]  # of which there is one row
    has_all = all({*key} <= {*side.output.names} for side in (left, right))
    if left.key != right.key and ((left.keyed and right.keyed) or not has_all):
        raise FlowError(
            f"stage {stage} has key ({show_key(left.key)}) on one side and ({show_key(right.key)}) on the other: "
            "rows cannot be matched"
        )
    if not wanted:
        if left.output.names != right.output.names:
            raise FlowError(f"stage {stage} has no key, and other columns on one side: rows cannot be matched")
        maps = [f.name for f in left.output if pa.types.is_map(f.type)]
        if maps:
            raise FlowError(
                f"stage {stage} has no key, and column {maps[0]!r} is of maps, by which Spark matches no rows"
            )
        _check_types(left, right, left.output.names)
        return list(left.output.names), [], False
    key = [name for name in key if name in left.output.names]
    values = [n for n in left.output.names if n in right.output.names and n not in key]
    _check_types(left, right, [*key, *values])
    return key, values, True


def _check_types(left: BoundStage, right: BoundStage, names: Sequence[str]) -> None:
    """Raises FlowError where a column is of two types, unless both are of numbers."""
    for name in names:
        types = [side.output.field(name).type for side in (left, right)]
        if types[0] != types[1] and not all(map(is_number, types)):
            raise FlowError(
                f"stage {left.name}: column {name!r} is {types[0]} on one side and {types[1]} on the other: they "
                "cannot be compared"
            )


def _check_unique(rows: DataFrame, key: Sequence[str], whose: str) -> None:
    """Raises FlowError where rows of the side without a key have one of the other side's key in common."""
    if not rows.groupBy(*(F.col(quoted(name)) for name in key)).count().where("count > 1").isEmpty():
        raise FlowError(
            f"{whose} has key ({', '.join(key) or 'all rows'}) on one side, and several rows for some of them on the other, "
            "where it has none: rows cannot be matched"
        )


def _check_sides(a: Side, b: Side) -> None:
    """Raises InvalidInputError for what is no job."""
    others = [side for side in (a, b) if not hasattr(side, "shared_until")]
    if others:
        raise InvalidInputError(
            f"{others[0]!r} is compared: expected two jobs, as Job(...) and job.branch(...) return them; `nosync diff` compares "
            "the branches of a store without their code"
        )


def _epoch(a: Side, b: Side, as_of: AsOf | None) -> int:
    _check_sides(a, b)
    return _newest_of_both(a, b) if as_of is None else a.epoch_as_of(as_of)


def _newest_of_both(a: Side, b: Side) -> int:
    last = [job.last_sealed() for job in (a, b)]
    if None in last:
        raise FlowError("one side has no epoch yet: nothing to compare")
    return min(t for t in last if t is not None)
