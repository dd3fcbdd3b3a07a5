"""Tables that `join_static` joins with: their rows count as code, so they are those that were there when a job was made.

Invariants
- Small ones are kept in the memory of the driver, and nothing reads again where they came from.
- Large ones Spark keeps. Where it loses some it reads them again, as it does when the same session writes to their files. So
  each use begins with a look whether they are the same rows. (A host that is lost between the look and the join is not seen.)
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from nosync.lsm.errors import FlowError
from nosync.spark.errors import first_line, reason_of
from nosync.spark.session import conf_set

_JAVA_8 = "spark.sql.datetime.java8API.enabled"
FEW_ROWS = 10_000
"""Spark converts rows that a plan has whenever it plans: of more it would take long."""
_NULL = -0x6F73_796E_6300_0000
"""What is hashed for a null, whose column is added to it."""


@dataclass(frozen=True)
class _Taken:
    stage: str
    rows: str
    """Of a large table, which ones. Empty: they are here."""


_taken: WeakKeyDictionary[DataFrame, _Taken] = WeakKeyDictionary()


def rows_of(table: DataFrame) -> str:
    """Returns which rows a table has now, in whatever order: how many, and the sum of their hashes."""
    named = table.toDF(*(f"c{i}" for i in range(len(table.columns))))  # whatever needs quotes
    columns = [F.col(name) for name in named.columns]
    # The hash passes over nulls: which columns are null is hashed as well.
    hashed = F.xxhash64(*columns, *(F.when(column.isNull(), F.lit(_NULL + i)) for i, column in enumerate(columns)))
    # As a decimal the sum cannot overflow.
    n, total = named.agg(F.count(F.lit(1)), F.sum(hashed.cast("decimal(38,0)"))).collect()[0]
    return f"{n} rows {total}"


def with_its_rows(stage: str, table: DataFrame) -> DataFrame:
    """Returns a table that has, from now on, the rows that a table has now.

    Raises FlowError where it cannot be read, or has other rows each time.
    """
    if table in _taken:
        return table
    if not table._jdf.queryExecution().analyzed().deterministic():
        raise FlowError(f"stage {stage}: the table is computed with random functions: write it out first")
    try:
        taken, rows = _kept(table), ""
        if taken is None:
            taken = _large(table)
            rows = rows_of(taken)
    except (PySparkException, Py4JError) as error:
        raise FlowError(f"stage {stage}: the table that it joins with cannot be read: {_reason(error)}") from error
    _taken[taken] = _Taken(stage, rows)
    return taken


def _kept(table: DataFrame) -> DataFrame | None:
    """Returns a table with the rows of a small one, which do not leave the JVM. None: it is large."""
    spark = table.sparkSession
    # Dates and times of java.sql go by another calendar, and the JVM's time zone.
    with conf_set(spark, {_JAVA_8: "true"}):
        rows = table.limit(FEW_ROWS + 1)._jdf.collectAsList()
        if rows.size() > FEW_ROWS:
            return None
        return ClassicDataFrame(spark._jsparkSession.createDataFrame(rows, table._jdf.schema()), spark)


def _large(table: DataFrame) -> DataFrame:
    """Returns a large table that Spark keeps until nobody has it any more. By its plan it is no other one: Spark would give the
    rows that it keeps to whoever reads the same files later.
    """
    taken = table.where(F.lit(uuid.uuid4().hex) != "").persist(StorageLevel.MEMORY_AND_DISK)
    finalize(taken, _let_go, taken._jdf).atexit = False
    return taken


def _let_go(frame: Any) -> None:
    with contextlib.suppress(Py4JError):  # of a session that has ended
        frame.unpersist(False)


def check_same(table: DataFrame) -> None:
    """Raises FlowError where a large table has not the rows that it had when the job was made."""
    taken = _taken.get(table)
    if taken is None or not taken.rows:
        return
    try:
        now = rows_of(table)
    except (PySparkException, Py4JError) as error:
        now = _reason(error)
    if now != taken.rows:
        raise FlowError(
            f"stage {taken.stage}: the table that it joins with has other rows than when the job was made, and Spark lost some "
            f"that it kept ({now}; it was {taken.rows}). With the new rows it is other code: make the flow again, and "
            "job.upgrade(flow). For the old ones give a table that stays, such as a version of a Delta table"
        )


def _reason(error: Exception) -> str:
    return reason_of(str(error)) if isinstance(error, Py4JError) else first_line(error)
