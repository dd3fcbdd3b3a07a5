"""Expressions that Python evaluates itself have the values that Spark gives them, and all others are left to Spark."""

from __future__ import annotations

import os
import random
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from nosync.kernels.expressions import FUNCTIONS, Step, Value, applied
from nosync.spark.schemas import parse_ddl
from nosync.spark.session import conf_set
from tests.helpers.rows_by_two_ways import ROWS, WIDE, rows_of, wide_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

EXPRESSIONS = [
    "id = 3", "id <> 3", "3 < id", "id <= n", "id >= -5", "n > 2147483647", "name = 'näme 2'", "name < 'näme 3'", "name >= ''",
    "flag", "NOT flag", "flag = true", "flag AND n > 2", "flag OR n IS NULL", "NOT (flag AND n > 2)", "n IN (1, -3, 20)",
    "n IN (id, 3)", "NOT n IN (id, 3)", "3 IN (1, n)", "n IN (1, NULL)", "NOT n IN (1, NULL)",
    "CAST(n AS INT) = 3", "CAST(n AS BIGINT) = 3", f"id IN ({', '.join(map(str, range(-40, 40)))})",
    "NOT n IN (1, 2)", "name IN ('', 'näme 1')", "id IS NULL", "name IS NOT NULL", "id % 10 = 3", "id % 7 = -2",
    "(id + n) % 4 = 1", "id - n > 3", "id * n < -100", "n * 3 = 9", "true", "false", "id = NULL", "id <=> 3", "id <=> n",
    "NOT id <=> NULL", "id IS DISTINCT FROM n", "-id > 3", "IF(flag, id, n) = 3", "id BETWEEN -3 AND 17",
    "(id BETWEEN n AND 17) = (n BETWEEN 1 AND 2)", "nullif(n, 3) > 1", "coalesce(id, n, 0) = 0", "nvl(n, 7) = 7",
    "CASE WHEN flag THEN id WHEN n > 3 THEN n ELSE 0 END > 2", "CASE WHEN flag THEN name END = ''",
    "CASE n WHEN 1 THEN 'one' WHEN 2 THEN 'two' END IS NOT NULL", "name LIKE 'n%'", "name LIKE '%_me 1%'", "name LIKE ''",
    "NOT name LIKE '%2'", "substring(name, 1, 2) = 'nä'", "substring(name, 3, 100) = 'me 2'", "length(name) = 6",
    "(CASE WHEN id BETWEEN 1 AND 2 THEN id ELSE 0 END) BETWEEN 1 AND 2",
    "id > 1.5", "n / 2.5D > 1D", "id / 2 > 1", "abs(id) > 3", "concat(name, name, '') = ''",
    "replace(name, 'n', 'mm') = 'mmäme 1'", "replace(name, 'ä') = 'nme 1'", "lower(concat('A', 'b')) = 'ab'",
    "timestamp_seconds(id) < timestamp_millis(n)", "unix_seconds(timestamp_seconds(id)) = id",
    "unix_seconds(timestamp_millis(id)) = -1", "unix_millis(timestamp_micros(id)) = -1", "unix_micros(timestamp_micros(n)) = n",
    "date_format(timestamp_seconds(id), 'HH:mm:ss') > '12'", "date_format(timestamp_micros(id), 'yyyy-MM-dd mm/ss') > ''",
]  # fmt: skip

WIDE_EXPRESSIONS = [
    "day <= DATE '1998-12-01' - INTERVAL 90 DAYS", "day = DATE '9999-12-31'",
    "day BETWEEN DATE '0001-01-01' AND DATE '1970-01-01'",
    "year(day) = 1970", "month(day) = 12", "day(day) = 1", "extract(YEAR FROM day) > 1000", "date_add(day, s) > day",
    "datediff(day, DATE '2000-01-01') > 3", "at < at", "local = local", "at IN (at)",
    "amount > 0.05", "amount BETWEEN 0.05 AND 1.1", "amount * (1 - amount) > 0", "amount + large > 1", "amount - 1.5 < 0",
    "amount * l > 5", "coalesce(amount, 0) = 0", "CASE WHEN amount > 1 THEN amount ELSE 0 END = 0", "amount IN (1, 1.10)",
    "large * amount = 0", "large + large > 0", "amount / nullif(CAST(i AS DECIMAL(12, 0)), 0) > 0.1",
    "CAST(amount / CAST(7 AS DECIMAL(20, 0)) AS DECIMAL(19, 6)) > 0", "CAST(large AS DECIMAL(38, 2)) > 0",
    "CAST(large AS DECIMAL(38, 0)) = 0", "CAST(amount AS DECIMAL(10, 1)) = 1.1", "amount = large", "large <=> amount",
    "CAST(i AS DOUBLE) * 2 > 1", "CAST(b AS INT) + s = 3", "i + l > 0", "s - b < 0", "text LIKE 'ä%'",
    "hour(at) = 2", "minute(local) = 59", "second(at) > 0", "CAST(at AS DATE) = DATE '2026-03-29'", "year(at) = 1",
    "year(local) = 9999", "named_struct('a', i, 'b', text).b = 'a'", "named_struct('a', 1, 'b', 2).a = 1",
    "named_struct('a', named_struct('b', day)).a.b IS NULL", "bytes IS NULL",
    "flag OR day IS NULL", "abs(amount) > 1", "abs(large) > 1", "abs(d) > 1", "abs(i) = 1", "text || text > 'a'",
    "unix_seconds(at) < 0", "unix_millis(at) % 1000 = 999", "unix_micros(at) > 0", "replace(text, 'ab', '') = text",
]  # fmt: skip

OTHERS = [
    "d > amount", "id % n = 1", "id % 0 = 1", "id % -3 = 1", "CAST(id AS INT) = 3",
    "name = 3", "day > name", " + ".join(["id"] * 60) + " > 3", "try_add(id, n) = 3",
    "name LIKE 'a\\\\_b'", "name LIKE 'a/_b' ESCAPE '/'", "name LIKE concat(name, '%')", "substring(name, 0, 2) = 'a'",
    "substring(name, n, 2) = 'a'", "CAST(amount AS DOUBLE) > 1", "CAST(d AS DECIMAL(10, 2)) > 1",
    "amount / amount > 1 AND CAST(amount AS DECIMAL(38, 20)) / CAST(amount AS DECIMAL(38, 20)) > 1",
    "at > TIMESTAMP '2020-01-01 00:00:00'", "collate(name, 'UTF8_LCASE') = 'x'", "name = 'X' COLLATE UTF8_LCASE",
    "5 BETWEEN (CASE WHEN id BETWEEN 1 AND 2 THEN id ELSE 0 END) AND 7", "d IN (1D, 2D)", "-d > 0",
    "replace(name, '', 'x') = 'a'",
    "date_format(at, 'MMM') = 'Jan'", "date_format(at, 'MMMM') = 'January'", "date_format(at, 'yy') = '20'",
    "date_format(at, name) = '2020'", "date_format(at, 'yyyy\\'T\\'HH') = ''", "replace(name, name, 'a') = 'a'",
    "upper(name COLLATE UTF8_LCASE) = 'X'",
    "try_divide(id, 2) > 1",
    "named_struct('a', id) = named_struct('a', 3)",
    "name = CAST(X'ff' AS STRING)", "id > CAST('a' AS INT)", "id > 1 / 0",
]  # fmt: skip


def step(query: DataFrame, **settings: bool) -> Step | None:
    from nosync.spark.expression_translation import step_of
    from nosync.spark.expressions import analyzed

    return step_of(analyzed(query), query.sparkSession._jvm, **settings)


def check_alike(expression: str, rows: pa.Table, columns: str, spark: SparkSession) -> int:
    """Asserts that a condition, and the same as a column, have Spark's values. Returns how many of both were evaluated."""
    from pyspark.errors import PySparkException

    evaluated, there = 0, None
    rows = rows.append_column("number", pa.array(range(rows.num_rows)))
    given = spark.createDataFrame(rows, f"{columns}, number bigint")
    as_column = given.selectExpr("number", f"{expression} AS made", "1 AS one")
    for query in (given.where(expression), as_column):
        found = step(query)
        if found is None:
            continue
        try:
            made, numbers = applied([found], rows)
        except pa.ArrowException:
            continue  # which Spark is asked for
        try:
            there = as_column.toArrow() if there is None else there
        except PySparkException as error:
            raise AssertionError(f"Spark refuses {expression}, which Python evaluates") from error
        evaluated += 1
        is_condition = found.condition is not None
        shown = ["number"] if is_condition else ["number", "made", "one"]
        expected = (there.filter(there["made"]) if is_condition else there).select(shown)
        assert made.select(shown).to_pylist() == expected.to_pylist(), expression
        assert made.select(shown).schema.types == expected.schema.types, expression
        assert made.column("number").to_pylist() == numbers.tolist()
    return evaluated


@pytest.mark.few(30)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_has_the_values_that_spark_gives_it(expression: str, spark: SparkSession) -> None:
    assert check_alike(expression, rows_of(0), ROWS, spark) == 2


@pytest.mark.few(20)
@pytest.mark.parametrize("expression", WIDE_EXPRESSIONS)
def test_an_expression_over_other_types_has_the_values_that_spark_gives_it(
    expression: str, spark: SparkSession
) -> None:
    """Of values that are the largest of their type some are left to Spark; each of the expressions is evaluated somewhere."""
    rows = wide_rows(90)
    numbers = {name: rows.column(name).to_pylist() for name in ("i", "l", "large")}
    is_small = [all(abs(of[i] or 0) < 100 for of in numbers.values()) for i in range(rows.num_rows)]
    small = rows.filter(pa.array(is_small))
    assert small.num_rows > 3
    assert check_alike(expression, rows, WIDE, spark) + check_alike(expression, small, WIDE, spark) >= 2


@pytest.mark.few(12)
@pytest.mark.parametrize("expression", OTHERS)
def test_other_expressions_are_left_to_spark(expression: str, spark: SparkSession) -> None:
    frame = spark.createDataFrame([], f"{ROWS}, d double, day date, amount decimal(38, 2), at timestamp")
    assert step(frame.where(expression)) is None
    assert step(frame.selectExpr(f"{expression} AS made")) is None


def test_columns_that_others_of_the_same_select_make_are_left_to_spark(spark: SparkSession) -> None:
    assert step(spark.createDataFrame([], ROWS).selectExpr("id + 1 AS more", "more + 1 AS most")) is None


def test_a_quotient_that_is_just_below_a_half_is_not_rounded_up(spark: SparkSession) -> None:
    """Rounded to 38 digits first it would be a half."""
    rows = pa.table({"a": pa.array([Decimal(10**27)], pa.decimal128(32, 0)), "b": [Decimal(2 * 10**33 + 1)]})
    assert check_alike("a / b = 0", rows, "a decimal(32, 0), b decimal(38, 0)", spark) == 2
    query = spark.createDataFrame([], "a decimal(32, 0), b decimal(38, 0)").selectExpr("a / b AS q")
    found = step(query)
    assert found is not None
    assert applied([found], rows)[0].to_pylist() == [{"q": Decimal("0.000000")}]


def test_what_stands_at_several_places_is_evaluated_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `nullif` its first argument does. One in the other would take twice the time each."""
    expression = "id"
    for i in range(10):
        expression = f"nullif({expression}, {i})"
    found = step(spark.createDataFrame([], ROWS).selectExpr(f"{expression} AS made"))
    assert found is not None
    calls = []

    def counted(left: Value, right: Value) -> Value:
        calls.append(1)
        return pc.equal(left, right)

    monkeypatch.setitem(cast("dict[str, object]", FUNCTIONS), "EqualTo", counted)
    applied([found], rows_of(0))
    assert len(calls) == 10


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("d > 1", [0.5, float("nan")]),
        ("d = d", [float("nan")]),
        ("d <=> d", [float("nan")]),
        ("d - d > 0", [float("inf")]),
        ("1 / d > 0", [1.0, 0.0]),
        ("1 / d > 0", [-0.0]),
        ("CAST(l AS DOUBLE) > 0", [2**53 + 1]),
        ("l + 1 > 0", [2**63 - 1]),
        ("-l > 0", [-(2**63)]),
    ],
)
def test_values_in_which_arrow_may_differ_are_left_to_spark(
    expression: str, values: list[float], spark: SparkSession
) -> None:
    found = step(spark.createDataFrame([], "d double, l bigint").where(expression))
    assert found is not None
    name, type_ = ("l", pa.int64()) if isinstance(values[0], int) else ("d", pa.float64())
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({name: pa.array(values, type_)}))


def test_a_decimal_that_has_no_place_in_the_type_when_it_is_rounded_is_left_to_spark(spark: SparkSession) -> None:
    """Arrow's own rounding makes a zero of it."""
    found = step(spark.createDataFrame([], "a decimal(10, 2)").selectExpr("CAST(a AS DECIMAL(9, 1)) AS made"))
    assert found is not None
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({"a": pa.array([Decimal("-99999999.99")], pa.decimal128(10, 2))}))


@pytest.mark.parametrize(
    ("type_", "value", "cast"),
    [
        ("bigint", 7152510951449350136, "DECIMAL(38, 20)"),
        ("int", 1108165996, "DECIMAL(38, 30)"),
        ("decimal(20, 2)", Decimal("91263314849.52"), "DECIMAL(38, 30)"),
        ("decimal(38, 0)", Decimal("45335900972276746336550"), "DECIMAL(38, 18)"),
    ],
)
def test_a_decimal_that_has_no_place_with_more_digits_behind_the_point_is_left_to_spark(
    type_: str, value: Any, cast: str, spark: SparkSession
) -> None:
    """Arrow's own cast wraps around 128 bits, and does not notice."""
    found = step(spark.createDataFrame([], f"a {type_}").selectExpr(f"CAST(a AS {cast}) AS made"))
    assert found is not None
    schema = parse_ddl(f"a {type_}")
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({"a": [value]}, schema=schema))
    assert applied([found], pa.table({"a": [None, 7]}, schema=schema))[0]["made"].to_pylist() == [None, Decimal(7)]


@pytest.mark.parametrize("function", ["year", "month", "day"])
@pytest.mark.parametrize("days", [20_000_000, -20_000_000])
def test_a_date_of_a_year_that_arrow_does_not_have_is_left_to_spark(
    function: str, days: int, spark: SparkSession
) -> None:
    found = step(spark.createDataFrame([], "day date").where(f"{function}(day) = 1"))
    assert found is not None
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({"day": pa.array([days], pa.int32()).cast(pa.date32())}))


@pytest.mark.parametrize("function", ["lower", "upper"])
def test_letters_beyond_ascii_are_left_to_spark(function: str, spark: SparkSession) -> None:
    texts = pa.array(["", None, "aZ9[`{@", "\0"])
    assert check_alike(f"{function}(name) = 'az9[`{{@'", pa.table({"name": texts}), "name string", spark) == 2
    found = step(spark.createDataFrame([], "name string").where(f"{function}(name) = 'i'"))
    assert found is not None
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({"name": ["İ"]}))


@pytest.mark.parametrize("year", [1582, 10_000, -1])
def test_years_whose_days_are_written_otherwise_are_left_to_spark(year: int, spark: SparkSession) -> None:
    found = step(spark.createDataFrame([], "at timestamp").where("date_format(at, 'yyyy-MM-dd') = ''"))
    assert found is not None
    seconds = (year - 1970) * 31_556_952 + 86_400  # the second day of it or so
    times = pa.array([seconds]).cast(pa.timestamp("s", "UTC")).cast(pa.timestamp("us", "UTC"))
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({"at": times}))


@pytest.mark.parametrize(
    "micros", [0, -1, -1_000_000, 1_767_312_000_999_999, -12_200_000_000_000_000, 253_402_300_799_999_999]
)
def test_times_are_written_as_spark_writes_them(micros: int, spark: SparkSession) -> None:
    rows = pa.table({"at": pa.array([micros, None], pa.int64()).cast(pa.timestamp("us", "UTC"))})
    pattern = "yyyy/MM/dd HH:mm:ss_-., "
    query = spark.createDataFrame(rows).selectExpr(f"date_format(at, '{pattern}') AS made")
    found = step(query)
    assert found is not None
    made, _ = applied([found], rows)
    with conf_set(spark, {"spark.sql.session.timeZone": "UTC"}):
        assert made.to_pylist() == query.toArrow().to_pylist()


@pytest.mark.parametrize("condition", ["name LIKE 'a%'", "length(name) = 1", "substring(name, 1, 1) = 'a'"])
def test_a_text_that_is_none_is_left_to_spark(condition: str, spark: SparkSession) -> None:
    found = step(spark.createDataFrame([], "name string").where(condition))
    assert found is not None
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
    with pytest.raises(pa.ArrowException):
        applied([found], pa.table({"name": broken}))


def test_digits_that_another_setting_would_keep_are_left_to_spark(spark: SparkSession) -> None:
    query = spark.createDataFrame([], "amount decimal(38, 2)").selectExpr("amount * 1.5 AS made")
    assert step(query) is not None
    assert step(query, may_lose_digits=False) is None


# --- by chance --------------------------------------------------------------------------------------------------------

_NUMBERS = ["id", "n", "3", "-7", "0", "CAST(n AS BIGINT)", "amount", "price", "1.5", "0.01", "tax", "d", "2D", "0.1D"]
_TEXTS = [
    "name", "''", "'näme 1'", "substring(name, 2, 3)", "coalesce(name, 'x')", "name || substring(name, 1, 1)",
    "upper(substring(name, 3, 2))", "replace(name, 'm', '')", "date_format(timestamp_seconds(id * 86399), 'yyyy/MM/dd HH:mm')",
]  # fmt: skip
_DAYS = ["day", "DATE '2000-02-29'", "date_add(day, 3)", "DATE '1999-12-31' + INTERVAL 3 MONTHS"]


def number(chance: random.Random, depth: int) -> str:
    if depth == 0:
        return chance.choice(_NUMBERS)
    a, b = number(chance, depth - 1), number(chance, depth - 1)
    return chance.choice(
        [f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} / nullif({b}, 0))", f"coalesce({a}, {b})", f"({a} % 7)",
         f"CASE WHEN {condition(chance, depth - 1)} THEN {a} ELSE {b} END", f"IF({condition(chance, depth - 1)}, {a}, {b})",
         f"CAST({a} AS DECIMAL(20, 3))",
         f"abs({a})", f"CAST({a} AS DECIMAL(38, 1))", f"CAST(length({chance.choice(_TEXTS)}) AS BIGINT)",
         f"CAST(year({chance.choice(_DAYS)}) AS BIGINT)", f"nullif({a}, {b})",
         f"unix_seconds(timestamp_millis(id * 7 + {chance.randrange(3000)}))"]
    )  # fmt: skip


def condition(chance: random.Random, depth: int) -> str:
    a, b = number(chance, max(0, depth - 1)), number(chance, max(0, depth - 1))
    signs = ["=", "<>", "<", "<=", ">", ">=", "<=>"]
    text, other = chance.choice(_TEXTS), chance.choice(_TEXTS)
    leaf = [
        f"{a} {chance.choice(signs)} {b}", f"{a} BETWEEN {b} AND 5", f"{a} IS NULL", f"{a} IN ({b}, 3)", "flag",
        f"{text} {chance.choice(signs)} {other}", f"{text} LIKE '%{chance.choice(['m', 'n_', '1', ''])}%'",
        f"{chance.choice(_DAYS)} {chance.choice(signs)} {chance.choice(_DAYS)}",
    ]  # fmt: skip
    if depth == 0:
        return chance.choice(leaf)
    p, q = condition(chance, depth - 1), condition(chance, depth - 1)
    return chance.choice([*leaf, f"({p} AND {q})", f"({p} OR {q})", f"(NOT {p})"])


def rows_of_chance(seed: int, n: int = 60) -> pa.Table:
    chance = np.random.default_rng(seed)
    rows = rows_of(seed, n)

    def decimals(type_: pa.DataType, least: int, most: int) -> pa.Array:
        words = np.stack([chance.integers(least, most, n), np.zeros(n, dtype=np.int64)], axis=1)
        words[:, 1] = words[:, 0] >> 63
        return pa.Array.from_buffers(type_, n, [None, pa.py_buffer(np.ascontiguousarray(words))])

    return rows.append_column("amount", decimals(pa.decimal128(15, 2), -10_000, 10_000)).append_column(
        "price", decimals(pa.decimal128(15, 2), 90_000, 10_000_000)
    ).append_column("tax", decimals(pa.decimal128(38, 4), 0, 1_000)).append_column(
        "d", pa.array(np.round(chance.normal(0, 5, n), 2))
    ).append_column("day", pa.array(chance.integers(10_000, 12_000, n).astype(np.int32)).cast(pa.date32()))  # fmt: skip


def test_expressions_of_chance_have_the_values_that_spark_gives_them(spark: SparkSession) -> None:
    """NOSYNC_EXPRESSIONS says how many are tried."""
    from pyspark.errors import PySparkException

    tries, evaluated = int(os.environ.get("NOSYNC_EXPRESSIONS", "25")), 0
    for seed in range(tries):
        chance = random.Random(seed)
        rows = rows_of_chance(seed)
        expression = condition(chance, 2) if seed % 2 else number(chance, 2)
        query = spark.createDataFrame(rows).selectExpr(f"{expression} AS made")
        found = step(query)
        if found is None:
            continue
        try:
            made, _ = applied([found], rows)
        except pa.ArrowException:
            continue
        try:
            there = query.toArrow()
        except PySparkException as error:
            raise AssertionError(f"{seed}: Spark refuses {expression}, which Python evaluates") from error
        assert made.schema.field("made").type == there.schema.field("made").type, f"{seed}: {expression}"
        assert made.column("made").to_pylist() == there.column("made").to_pylist(), f"{seed}: {expression}"
        evaluated += 1
    assert evaluated >= tries // 3
