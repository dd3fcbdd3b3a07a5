"""AUTO CDC: rows of a source say what is there by key, and a table keeps the newest of them, or all with their times.

Both are queries over all rows of the source, so a row that comes late is put where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, cast

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.classic.column import Column as ClassicColumn

from nosync.lsm.columnar.columns import END_AT_COLUMN, START_AT_COLUMN
from nosync.lsm.errors import FlowError
from nosync.lsm.platform.nearest import did_you_mean
from nosync.pipelines.reading import ProjectPlanner
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import Node, found, items, kind_of

_DELETED, _AT, _PLACE = "nosync_deleted", "nosync_at", "nosync_place"
_BEGAN, _ENDED, _IS_SHOWN = "nosync_began", "nosync_ended", "nosync_is_shown"


@dataclass(frozen=True)
class Chosen:
    """Columns that a definition names: those that it wants, or all but some. Names, or Columns."""

    only: list[Any] | None = None
    all_but: list[Any] | None = None

    def of(self, columns: Sequence[str], told: _Told) -> list[str]:
        """Returns which of `columns` are chosen, in their order. Raises FlowError where the definition names another one."""
        named = {one.lower() for one in told.checked(self.only or self.all_but or [], columns)}
        return [name for name in columns if (name.lower() in named) == bool(self.only)]


@dataclass(frozen=True)
class Changes:
    """An AUTO CDC flow."""

    source: str
    keys: list[Any]
    """Names of columns, or Columns."""
    sequence_by: Any
    deletes: Any | None
    columns: Chosen
    has_history: bool = False
    """Whether the rows that were there before are kept, with their times: SCD type 2."""
    tracked: Chosen = Chosen()
    """The columns whose other values begin another row of the history. In others the newest value counts."""


def changes_of(plan: Node) -> Changes:
    """Returns the AUTO CDC of a statement."""
    source = plan.source()
    while kind_of(source) != "UnresolvedRelation":
        source = source.child()
    deletes = found(plan.deleteCondition())
    return Changes(
        name_of(source),
        [name_of(one) for one in items(plan.keys())],
        str(plan.sequenceByExpr().sql()),
        None if deletes is None else str(deletes.sql()),
        Chosen(_names(plan.includeColumns()), _names(plan.excludeColumns())),
        str(plan.storedAsScdType()) == "2",
        Chosen(_names(plan.trackHistoryColumns()), _names(plan.trackHistoryExceptColumns())),
    )


def _names(columns: Node) -> list[Any] | None:
    given = found(columns)
    return None if given is None else [name_of(one) for one in items(given)]


def name_of(identifier: Node) -> str:
    """Returns a name of a statement, with a dot between its parts."""
    is_relation = kind_of(identifier) == "UnresolvedRelation"
    parts = identifier.multipartIdentifier() if is_relation else identifier.nameParts()
    return ".".join(str(part) for part in items(parts))


def rows_of(planner: ProjectPlanner, changes: Changes, name: str, where: str) -> DataFrame:
    """Returns the rows of the target of AUTO CDC. Raises FlowError, naming the place, for a column that is not there."""
    told = _Told(planner.session.readStream.table(changes.source), changes, name, where)
    return told.history() if changes.has_history else told.newest()


class _Told:
    """The rows of a source, and when each says what."""

    def __init__(self, rows: DataFrame, changes: Changes, name: str, where: str) -> None:
        self._changes, self._where = changes, where
        self._columns = changes.columns.of(rows.columns, self)
        self._keys = self.checked(changes.keys, rows.columns)
        if not self._keys:
            raise FlowError(
                f"{where}: AUTO CDC {name} has no keys: they say which rows follow each other, as in keys=['id']"
            )
        by, deletes = _column(changes.sequence_by, where), changes.deletes
        self._check(rows, by, None if deletes is None else _column(deletes, where), f"{where}: AUTO CDC {name}")
        is_deleted = F.lit(False) if deletes is None else F.coalesce(_column(deletes, where), F.lit(False))
        is_lacking = reduce(or_, (F.col(quoted(key)).isNull() for key in self._keys))
        # Without the line: what a message says is part of what a stage computes.
        no_order = f"AUTO CDC {name}: SEQUENCE BY is null in a row, and it says which row of a key is the newest"
        no_key = f"AUTO CDC {name}: a key is null in a row: KEYS are {', '.join(self._keys)}"
        self._rows = rows.withColumn(_DELETED, is_deleted).withColumn(
            _AT,
            F.when(by.isNull(), F.raise_error(F.lit(no_order)))
            .when(is_lacking, F.raise_error(F.lit(no_key)))
            .otherwise(by),
        )

    def _check(self, rows: DataFrame, by: Column, deletes: Column | None, whose: str) -> None:
        """Raises FlowError for keys, an order or deletions that say nothing, or something else than was meant."""
        lower = [key.lower() for key in self._keys]
        twice = next((key for key in self._keys if lower.count(key.lower()) > 1), None)
        if twice is not None:
            raise FlowError(f"{whose}: column {twice!r} is twice among its keys")
        chosen = {column.lower() for column in self._columns}
        without = next((key for key in self._keys if key.lower() not in chosen), None)
        if without is not None:
            raise FlowError(
                f"{whose}: key {without!r} is none of the columns that it keeps ({', '.join(self._columns)}), without which its "
                "rows could not be told apart: keep it"
            )
        analyzed: Node = rows.select(by)._jdf.queryExecution().analyzed()
        if analyzed.projectList().apply(0).references().isEmpty():
            raise FlowError(
                f"{whose}: SEQUENCE BY {by} has no column in it, and it says which row of a key is the newest"
            )
        if deletes is not None and (type_ := rows.select(deletes).schema[0].dataType.simpleString()) != "boolean":
            raise FlowError(
                f"{whose}: APPLY AS DELETE WHEN is {type_}, expected a condition, such as \"operation = 'DELETE'\""
            )

    def checked(self, given: Sequence[Any], columns: Sequence[str]) -> list[str]:
        """Returns names of columns as the definition has them. Raises FlowError where one is not among `columns`."""
        names, there = [_name_in(one, self._where) for one in given], [one.lower() for one in columns]
        for name in names:
            if name.lower() not in there:
                raise FlowError(
                    f"{self._where}: {self._changes.source} has no column {name!r}; it has {', '.join(columns)}"
                    f"{did_you_mean(name, columns)}"
                )
        return names

    def newest(self) -> DataFrame:
        """Returns of each key what the newest of its rows says, whenever that came.

        Keys that were deleted are kept, so that a row which comes late does not bring one back.
        """
        newest_first = Window.partitionBy(*map(quoted, self._keys)).orderBy(F.col(_AT).desc(), F.col(_DELETED).desc())
        newest = self._rows.withColumn(_PLACE, F.row_number().over(newest_first))
        return newest.where(f"{_PLACE} = 1 AND NOT {_DELETED}").select(*map(quoted, self._columns))

    def history(self) -> DataFrame:
        """Returns what each key had, with when it began and ended: the rules are those of Spark.

        Rows of a key that follow one another and agree in all tracked columns are one row, of the values that came last,
        from when the first of them says. Of rows that say the same time one counts, and that is a deletion if there is one.
        """
        reserved = next((one for one in self._rows.columns if one.upper() in (START_AT_COLUMN, END_AT_COLUMN)), None)
        if reserved is not None:
            raise FlowError(
                f"{self._where}: {self._changes.source} has a column {reserved!r}, and a history adds one of this name: "
                "rename it in what is read"
            )
        keys = [one.lower() for one in self._keys]
        tracked = self._changes.tracked.of([one for one in self._columns if one.lower() not in keys], self)
        of_key = Window.partitionBy(*map(quoted, self._keys))
        in_order = of_key.orderBy(_AT)
        of_one_time = Window.partitionBy(*map(quoted, [*self._keys, _AT])).orderBy(F.col(_DELETED).desc())
        rows = self._rows.withColumn(_PLACE, F.row_number().over(of_one_time)).where(f"{_PLACE} = 1")

        def goes_on(beside: Any) -> Column:
            """Returns whether the row beside a row is not deleted, and agrees with it."""
            agrees = (F.col(quoted(one)).eqNullSafe(beside(quoted(one)).over(in_order)) for one in tracked)
            return reduce(and_, agrees, F.coalesce(~beside(_DELETED).over(in_order), F.lit(False)))

        runs = rows.withColumns({
            _BEGAN: F.when(~F.col(_DELETED) & ~goes_on(F.lag), F.col(_AT)),
            _ENDED: F.lead(_AT).over(in_order),
            _IS_SHOWN: ~F.col(_DELETED) & ~goes_on(F.lead),
        })  # fmt: skip
        until_here = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
        # The last one is the largest, and a struct of several columns is not compared over a window.
        began = runs.withColumn(_BEGAN, F.last(_BEGAN, ignorenulls=True).over(until_here)).where(_IS_SHOWN)
        times = [F.col(_BEGAN).alias(START_AT_COLUMN), F.col(_ENDED).alias(END_AT_COLUMN)]
        return began.select(*map(quoted, self._columns), *times)


def _column(given: Any, where: str) -> Column:
    """Returns an expression of a definition as a Column of this session. Those of Spark Connect are text inside."""
    if isinstance(given, str):
        return F.expr(given)
    if isinstance(given, ClassicColumn):
        return given
    inner = getattr(given, "_expr", None)
    text = next(
        (t for t in (getattr(inner, name, None) for name in ("_expr", "_unparsed_identifier")) if isinstance(t, str)),
        None,
    )
    if text is None:
        raise FlowError(
            f"{where}: {given} is an expression of Spark Connect: write it as text, or by pyspark.sql.functions"
        )
    return F.expr(text)


def _name_in(given: Any, where: str) -> str:
    """Returns the name of the column that a definition gives as a text or as a Column."""
    expression = cast("ClassicColumn", _column(given, where))._jc.node() if not isinstance(given, str) else None
    name = given if expression is None else str(expression.sql())
    return name.strip("`")
