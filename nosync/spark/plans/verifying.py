"""Comparing a view with what Spark makes of its query over the recorded inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from nosync.flow.views import View
from nosync.lsm.columnar.closeness import are_close
from nosync.spark.expressions import quoted
from nosync.spark.plans.query import Planner
from nosync.spark.plans.rules import in_utc
from nosync.spark.session import conf_set, is_in_utc


def compare(
    spark: SparkSession, settings: Mapping[str, str], view: View, views: Mapping[str, View],
    read: Callable[[SparkSession, str], DataFrame],
) -> tuple[int, int, pa.Table, pa.Table]:  # fmt: skip
    """Returns how many rows a view has and Spark's query gives, and those that only the one or the other has.

    `read(session, stage)` gives the state of a stage. Views that the view reads are queries as well.
    """
    planner = Planner(spark)
    session = planner.session
    with conf_set(session, dict(settings)):
        _register(planner, view, views, read, set())
        expected = _as_in_epochs(session, _asked(planner, view)).toArrow()
        found = read(session, view.name).select(*[quoted(name) for name, _ in view.columns]).toArrow()
    extra, missing = different(found, expected)
    return found.num_rows, expected.num_rows, extra, missing


def _register(
    planner: Planner,
    view: View,
    views: Mapping[str, View],
    read: Callable[[SparkSession, str], DataFrame],
    known: set[str],
) -> None:
    for name in view.inputs:
        if name in known:
            continue
        known.add(name)
        if name in views:
            _register(planner, views[name], views, read, known)
            _as_in_epochs(planner.session, _asked(planner, views[name])).createOrReplaceTempView(quoted(name))
        else:
            read(planner.session, name).createOrReplaceTempView(quoted(name))


def _asked(planner: Planner, view: View) -> DataFrame:
    if isinstance(view.query, str):
        return planner.session.sql(view.query)
    with planner.views_kept(view.inputs):
        frame: DataFrame = view.query({name: planner.session.table(quoted(name)) for name in view.inputs})
    return frame


def _as_in_epochs(session: SparkSession, frame: DataFrame) -> DataFrame:
    """Returns what a query gives in an epoch: constant instants are of the session's time zone, and all else goes by UTC."""
    if is_in_utc(session):
        return frame
    plan = in_utc(session, frame._jdf.queryExecution().analyzed())
    made = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan)  # type: ignore[union-attr]
    return ClassicDataFrame(made, session)


def different(found: pa.Table, expected: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns the rows that only one of two tables has, as often as it has them more often.

    Lists are compared without their order: what collects values does it in none.
    """
    rows = [[_without_order(row) for row in table.to_pylist()] for table in (found, expected)]
    counts = [Counter(map(repr, of_one)) for of_one in rows]
    extra, missing = _more(rows[0], counts[0] - counts[1]), _more(rows[1], counts[1] - counts[0])
    by_rest: dict[str, list[int]] = {}  # only rows that are the same but for doubles can be close
    for j in missing:
        by_rest.setdefault(repr(_without_doubles(rows[1][j])), []).append(j)
    close = set()
    for i in extra:
        others = by_rest.get(repr(_without_doubles(rows[0][i])), [])
        same = next((j for j in others if are_close(rows[0][i], rows[1][j])), None)
        if same is not None:
            others.remove(same)
            close |= {(0, i), (1, same)}
    extra, missing = [i for i in extra if (0, i) not in close], [j for j in missing if (1, j) not in close]
    return found.take(pa.array(extra, pa.int64())), expected.take(pa.array(missing, pa.int64()))


def _more(rows: list[Any], more: Counter[str]) -> list[int]:
    """Returns the places of rows of which there are more than of the other side."""
    places = []
    for i, row in enumerate(rows):
        if more[repr(row)] > 0:
            more[repr(row)] -= 1
            places.append(i)
    return places


def _without_doubles(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_doubles(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_doubles(part) for part in value]
    return "a double" if isinstance(value, float) else value


def _without_order(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_order(part) for name, part in value.items()}
    if isinstance(value, list):
        return sorted(map(_without_order, value), key=repr)
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0.0
