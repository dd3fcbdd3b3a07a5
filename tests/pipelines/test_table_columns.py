"""Columns of the tables of a project. Where one gets others, what is built on it begins anew, and earlier epochs stay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipelines.projects import Project
from tests.pipelines.texts import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ITEMS = """@dp.materialized_view
def items():
    return spark.read.schema('{}').json('data/items.json')

@dp.materialized_view
def counts():
    return spark.table('items').groupBy('k').count()
"""
ROWS = [{"k": 1, "a": "x", "b": 1.5}, {"k": 2, "a": "y", "b": 2.5}]


def test_a_table_loses_a_column_gets_another_type_and_has_it_back(spark: SparkSession, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", spark, items=ITEMS.format("k int, a string, b double"))
    project.write_table("items", ROWS)
    project.run()
    project.write("items", ITEMS.format("k int, a string"))
    upgrade = project.run().upgrade
    assert upgrade is not None
    assert set(upgrade.begins_anew) == {"items", "counts"}
    assert "items-input-2" in upgrade.new
    assert project.rows("items") == counted(("x", 1), ("y", 2))
    project.write("items", ITEMS.format("k string, a string"))
    project.write_table("items", [*ROWS, {"k": 2, "a": "z"}])
    project.run()
    assert project.rows("items") == counted(("x", "1"), ("y", "2"), ("z", "2"))
    assert project.rows("counts") == counted((1, "1"), (2, "2"))
    again = project.run()
    assert (again.epochs, again.upgrade) == ((), None)
    assert project.rows("items", as_of=0) == counted(("x", 1.5, 1), ("y", 2.5, 2))
    assert project.rows("items", as_of=1) == counted(("x", 1), ("y", 2))


@pytest.mark.long("make spark")
def test_a_column_that_is_added_goes_on_and_can_go_again(spark: SparkSession, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", spark, items=ITEMS.format("k int, a string"))
    project.write_table("items", ROWS)
    project.run()
    project.write("items", ITEMS.format("k int, a string, b double"))
    upgrade = project.run().upgrade
    assert upgrade is not None
    assert upgrade.new_columns == {"items-input_changes": ("b",)}
    assert project.rows("items") == counted(("x", 1.5, 1), ("y", 2.5, 2))
    for schema, rows in [("k int, a string", [("x", 1), ("y", 2)]), ("a string, k int", [("x", 1), ("y", 2)])]:
        project.write("items", ITEMS.format(schema))
        project.run()
        assert project.rows("items") == counted(*rows)


@pytest.mark.long("make spark")
def test_the_first_reader_of_a_shared_table_is_taken_out(spark: SparkSession, tmp_path: Path) -> None:
    """The table has the name of its first reader, so it is another input, which begins anew."""
    reader = "@dp.materialized_view\ndef {}():\n    return spark.read.schema('k int').json('data/items.json').{}\n\n"
    first, second = reader.format("a", "distinct()"), reader.format("b", "where('k > 1')")
    project = Project(tmp_path / "p", spark, items=first + second)
    project.write_table("items", ROWS)
    project.run()
    project.write("items", second)
    assert project.run().rows == {"b": 1}
    assert project.rows("b") == counted((2,))


def test_a_table_may_have_a_column_of_the_name_of_its_ids(spark: SparkSession, tmp_path: Path) -> None:
    text = "@dp.materialized_view\ndef items():\n    return spark.read.schema('Row_ID string, v int').json('data/items.json')\n"
    project = Project(tmp_path / "p", spark, items=text)
    project.write_table("items", [{"Row_ID": "a", "v": 1}, {"Row_ID": "a", "v": 1}, {"Row_ID": "b", "v": 2}])
    project.run()
    project.write_table("items", [{"Row_ID": "a", "v": 1}, {"Row_ID": "b", "v": 3}])
    assert [one.rows_in for one in project.run().epochs] == [3]
    assert project.rows("items") == counted(("a", 1), ("b", 3))
    project.run()
    assert project.rows("items") == counted(("a", 1), ("b", 3))


def test_a_table_is_compared_to_the_microsecond(spark: SparkSession, tmp_path: Path) -> None:
    text = "@dp.materialized_view\ndef items():\n    return spark.read.schema('k int, at timestamp').json('data/items.json')\n"
    project = Project(tmp_path / "p", spark, items=text)
    project.write_table(
        "items", [{"k": 1, "at": "2026-01-01T00:00:00.123456Z"}, {"k": 2, "at": "2026-01-01T00:00:00Z"}]
    )
    project.run()
    project.write_table(
        "items", [{"k": 1, "at": "2026-01-01T00:00:00.123789Z"}, {"k": 2, "at": "2026-01-01T00:00:00Z"}]
    )
    assert [one.rows_in for one in project.run().epochs] == [2]
    assert {at.microsecond for at, _ in project.rows("items")} == {123789, 0}


def test_a_declared_column_that_the_query_does_not_give_is_null(spark: SparkSession, tmp_path: Path) -> None:
    text = "@dp.table(schema='more int, id bigint')\ndef a():\n    return spark.readStream.schema('id bigint').json('data/a')\n"
    project = Project(tmp_path / "p", spark, a=text)
    project.give("a", [{"id": 1}])
    project.run()
    assert project.rows("a") == counted((1, None))
