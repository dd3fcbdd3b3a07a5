"""Comparing a view with what Spark makes of its query over the recorded inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from nosync.flow.views import View
from nosync.spark.plans.catalyst import quoted
from nosync.spark.plans.query import Planner
from nosync.spark.session import conf_set

_DIGITS = 9
"""Sums of doubles depend in their last bits on the order in which they are added up."""


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
        expected = _asked(planner, view).toArrow()
        found = read(session, view.name).select(*[f"`{name}`" for name, _ in view.columns]).toArrow()
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
            _asked(planner, views[name]).createOrReplaceTempView(quoted(name))
        else:
            read(planner.session, name).createOrReplaceTempView(quoted(name))


def _asked(planner: Planner, view: View) -> DataFrame:
    if isinstance(view.query, str):
        return planner.session.sql(view.query)
    frame: DataFrame = view.query({name: planner.session.table(quoted(name)) for name in view.inputs})
    return frame


def different(found: pa.Table, expected: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns the rows that only one of two tables has, as often as it has them more often."""
    keys = [[_comparable(row) for row in table.to_pylist()] for table in (found, expected)]
    counts = [Counter(of_one) for of_one in keys]
    return _only(found, keys[0], counts[0] - counts[1]), _only(expected, keys[1], counts[1] - counts[0])


def _only(table: pa.Table, keys: list[Any], more: Counter[Any]) -> pa.Table:
    places = []
    for i, key in enumerate(keys):
        if more[key] > 0:
            more[key] -= 1
            places.append(i)
    return table.take(pa.array(places, pa.int64()))


def _comparable(value: Any) -> Any:
    """Returns a value that is equal to others that differ in the last bits of a double. Lists are compared as sets: what
    collects values does it in no order.
    """
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(f"{value:.{_DIGITS}g}") + 0.0
    if isinstance(value, Mapping):
        return tuple((name, _comparable(part)) for name, part in value.items())
    if isinstance(value, list):
        return tuple(sorted(map(_comparable, value), key=repr))
    return value
