"""Expressions read without Spark: what is taken is what Spark says, and what is not is refused with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import nosync
from nosync.flow.arguments import ExpressionArguments
from nosync.flow.kinds import SELECT, WHERE
from nosync.flow.stage import Stage
from nosync.kernels.expressions import applied
from nosync.lsm.columnar.columns import plain
from nosync.testing.expressions import analyze

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GIVEN = pa.schema(
    [
        pa.field("n", pa.int64()), pa.field("i", pa.int32()), pa.field("t", pa.int8()), pa.field("word", pa.string()),
        pa.field("is on", pa.bool_()), pa.field("x", pa.float64()), pa.field("at", pa.timestamp("us", "UTC")),
    ]
)  # fmt: skip
ROWS = pa.table(
    {
        "n": [1, None, -7, 1 << 40], "i": [5, 0, None, -3], "t": [1, 2, 3, None], "word": ["a", "it's", None, ""],
        "is on": [True, False, None, True], "x": [0.5, None, float("nan"), 1.0], "at": [None, 0, 1, 2],
    },
    schema=GIVEN,
)  # fmt: skip
CONDITIONS = (
    "n > 1", "n >= i", "i < 3 AND t <> 2", "NOT (word = 'a' OR word IS NULL)", "`is on`", "NOT `is on`", "x IS NOT NULL",
    "n IN (1, 2, 1099511627776)", "word IN ('a', 'b')", "word NOT IN ('a')", "i BETWEEN -3 AND 5", "n % 3 = 1", "n + i * 2 > -4",
    "-3 = i", "N = 1L", "t = 1", "true", "cast(i AS bigint) = n", "i + t - 1 > 0", "n NOT BETWEEN 0 AND 2", "`is on` = false",
)  # fmt: skip
SELECTS = (
    ["*"], ["word", "n AS m"], ["WORD"], ["n + 1 AS more", "i * t AS it"], ["*", "n > 1 AS big"], ["`is on` AS `was on`"],
    ["x", "at", "word w"], ["3 AS three", "'x' AS letter", "5000000000 AS large"], ["n % 7 AS rest", "cast(t AS int) AS wide"],
)  # fmt: skip


def stage_of(kind: str, *expressions: str) -> Stage:
    flow = nosync.Dataflow("f")
    source = flow.source("rows", "k string")
    return Stage(flow, "s", kind, (source.name,), arguments=ExpressionArguments(expressions))


@pytest.mark.few(10)
@pytest.mark.spark
@pytest.mark.parametrize(
    ("kind", "texts"), [*((WHERE, [one]) for one in CONDITIONS), *((SELECT, one) for one in SELECTS)]
)
def test_what_is_read_is_what_spark_reads(spark: SparkSession, kind: str, texts: list[str]) -> None:
    from nosync.spark.expressions import Analyzer
    from nosync.spark.session import expression_settings

    settings = expression_settings(spark)
    stage = stage_of(kind, *texts)
    mine, theirs = analyze(stage, GIVEN), Analyzer(spark, settings)(stage, GIVEN)
    assert plain(mine.schema.empty_table()).schema == plain(theirs.schema.empty_table()).schema
    assert (mine.described, dict(mine.kept), dict(mine.computed), mine.plain) == (
        theirs.described, dict(theirs.kept), dict(theirs.computed), theirs.plain,
    )  # fmt: skip
    assert mine.step is not None
    frame = spark.createDataFrame(ROWS)
    expected = (frame.where(texts[0]) if kind == WHERE else frame.selectExpr(*texts)).toArrow()
    found, _ = applied([mine.step], ROWS)
    assert repr(found.cast(expected.schema).to_pylist()) == repr(expected.to_pylist()), "NaN is no number to itself"


@pytest.mark.parametrize(
    "text",
    [
        "x > 0.5", "x > 1", "n / 2 = 1", "upper(word) = 'A'", "word LIKE 'a%'", "n = '1'", "word = \"a\"", "n <=> 1", "s.a = 1",
        "CASE WHEN n > 1 THEN true END", "n % i = 1", "cast(n AS int) = 1", "word || 'a' = 'aa'", "n + x > 1", "-n > 1",
        "n = (SELECT 1)", "rand() > 1", "n > 1 OR", "at > '2026-07-04'",
        "n > 1e5", "n > 2d", "n > 99999999999999999999", "n > 9223372036854775808L", "n > 1bd",
        "n > 1 --2", "n > 1 -- 2\n", "n > 1 /* 2 */",
    ],
)  # fmt: skip
def test_what_only_spark_evaluates_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises((nosync.FlowError, nosync.SchemaError), match="stage s: ") as refused:
        analyze(stage_of(WHERE, text), GIVEN)
    if isinstance(refused.value, nosync.FlowError):
        assert "map() over Arrow" in str(refused.value)
        assert "nosync.Job on a local Spark" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "n > DATE '2026-01-01'",
        "at > timestamp '2026-01-01'",
        "at + INTERVAL 1 DAY > at",
        "n IN (SELECT 1)",
        "n > x'ff'",
    ],
)
def test_words_of_sql_are_no_columns_that_are_missing(text: str) -> None:
    with pytest.raises(nosync.FlowError, match="needs Spark for"):
        analyze(stage_of(WHERE, text), GIVEN)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (WHERE, "nn > 1", "has no column 'nn'; it has .*did you mean 'n'"),
        (WHERE, "n + 1", "is a int64, expected a condition"),
        (SELECT, "n + 1", r"'n \+ 1' has no name: say n \+ 1 AS name"),
        (WHERE, "n IN (1", r"expected '\)'"),
        (WHERE, "n > ", "ends too early"),
    ],
)
def test_mistakes_are_told(kind: str, text: str, message: str) -> None:
    with pytest.raises(nosync.SchemaError, match=message):
        analyze(stage_of(kind, text), GIVEN)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(nosync.SchemaError, match="two of its columns are named 'n'"):
        analyze(stage_of(SELECT, "*", "i AS n"), GIVEN)
