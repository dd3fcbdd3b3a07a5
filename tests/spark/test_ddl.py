"""What nosync reads in DDL by itself is what Spark reads in it."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import nosync
from nosync.flow.ddl import TYPE_NAMES, columns_of
from nosync.lsm.columnar.columns import nullable
from nosync.spark.schemas import parse_ddl

pytestmark = pytest.mark.spark

READ = [
    "k string, n bigint", "K STRING,N LONG", "a: int, b: string", "struct<a: int, b: string>", "a int NOT NULL, b real",
    "a tinyint COMMENT 'it''s, one', b byte", "`a b` string, `c``d` date", "a array<struct<x: int, y: array<string>>>",
    "a decimal(12, 2), b dec, c numeric(5)", "a timestamp, b timestamp_ltz, c timestamp_ntz, d void, e binary, f boolean",
    "a interval day to second, b interval hour, date date", "a short, b smallint, c integer, d float -- the end",
    "a struct<`x y`: int NOT NULL COMMENT 'c', z double> /* b */", "1a string", "a array < array < int > >",
]  # fmt: skip
WRONG = [
    "k strng", "k", "k string n bigint", "k string,", ", k string", "a-b string", "a array<string", "a array<>", "a map<int>",
    "a decimal(40, 2)", "a decimal(3, 4)", "a string>", "a array", "(a string)", "a string COMMENT c", "a interval foo",
    "a.b string", "k int()", "a decimal()", "a decimal(3,2,1)", "a decimal(x)", "'k' string",
]  # fmt: skip
ARGUMENTS = {
    "char": "(1)", "character": "(1)", "varchar": "(1)", "array": "<int>", "map": "<int, int>", "struct": "<a: int>",
    "geometry": "(4326)", "geography": "(4326)",
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_it_reads_what_spark_reads(spark: SparkSession, text: str) -> None:
    theirs = parse_ddl(text)
    ours = columns_of(text, "it")
    assert list(ours) == theirs.names
    for name, type_ in ours.items():
        assert type_ is not None
        assert nullable(type_) == nullable(theirs.field(name).type)


@pytest.mark.parametrize("text", WRONG)
def test_it_refuses_what_spark_refuses(spark: SparkSession, text: str) -> None:
    with pytest.raises(PySparkException):
        StructType.fromDDL(text)
    with pytest.raises(nosync.SchemaError):
        columns_of(text, "it")


@pytest.mark.parametrize(
    "type_",
    [
        "varchar(3)",
        "char(2)",
        "string collate UTF8_LCASE",
        "interval",
        "interval year to month",
        "variant",
        "time(3)",
        "time",
    ],
)
def test_what_only_the_job_can_judge_has_a_name(spark: SparkSession, type_: str) -> None:
    StructType.fromDDL(f"a {type_}, b int")
    assert next(iter(columns_of(f"a {type_}, b int", "it").items())) == ("a", None)


def test_it_knows_every_type_of_spark(spark: SparkSession) -> None:
    jvm = spark._jvm
    assert jvm is not None
    for name in TYPE_NAMES:
        argument = ARGUMENTS.get(name, "")
        jvm.org.apache.spark.sql.types.StructType.fromDDL(f"x {name}{argument}")
