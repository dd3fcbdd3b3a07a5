"""Mistakes in projects of Declarative Pipelines: named with file and line, in the call where they are."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

import nosync
from nosync.spark.session import conf_set
from tests.pipelines.projects import Project
from tests.pipelines.texts import MORE, counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
pytestmark = pytest.mark.spark
CDC_IN_SQL = pytest.mark.skipif(
    Version(importlib.metadata.version("pyspark")) < Version("4.3"), reason="AUTO CDC in SQL is of Spark 4.3"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@dp.materialized_view\ndef a():\n    return spark.table('b')\n\n"
         "@dp.materialized_view\ndef b():\n    return spark.table('a')", "t.py:7: a reads b reads a"),
        ("@dp.materialized_view\ndef a():\n    return spark.table('a')", "a reads a"),
        ("@dp.materialized_view\ndef a():\n    return spark.table('ordres')\n\n"
         "@dp.table\ndef orders():\n    return spark.readStream.schema('x int').json('data/')", "t.py:7: a: .* 'orders'"),
        ("@dp.materialized_view\ndef a():\n    return spark.range(3).orderBy(F.rand())", "rand"),
        ("@dp.materialized_view\ndef a():\n    return spark.range(3).limit(2)", "t.py:7: view a: .*ORDER BY"),
        ("@dp.materialized_view\ndef a():\n    return 3", "a returned int, expected a DataFrame"),
        ("@dp.materialized_view\ndef a():\n    return 1 / 0", "t.py:7: a raised ZeroDivisionError"),
        ("@dp.table\ndef a():\n    return spark.range(3)", "reads no stream"),
        ("@dp.materialized_view\ndef a():\n    return spark.readStream.schema('x int').json('data/')", "reads a stream"),
        ("@dp.table\ndef a():\n    return spark.readStream.schema('id int').json('data/').join(spark.range(3), 'id')",
         "joins a stream with a table"),
        ("@dp.table(spark_conf={'spark.sql.ansi.enabled': 'false'})\ndef a():\n    return spark.range(3)", "spark_conf"),
        ("@dp.table\ndef a():\n    return spark.readStream.schema('id int').json('data/').groupBy('id').count()",
         "given once and never taken back"),
        ("dp.create_streaming_table('a')", "nothing fills a"),
        ("dp.create_streaming_table('a', schema='k string, n int')\n@dp.append_flow(target='a')\ndef f():\n"
         "    return spark.readStream.schema('k string, n int, more int').json('data/')",
         "t.py:7: a: its query gives the column 'more', which its schema \\(k, n\\) does not have"),
        ("@dp.table\ndef a():\n    return spark.readStream.schema('_id string, ID string').json('data/')",
         "columns '_id' and 'ID' of .* would both be recorded as 'ID'"),
        ("SET spark.sql.ansi.enabled = false;", "t.sql:1: SET: .*configuration"),
        ("spark.conf.set('spark.sql.ansi.enabled', 'false')", "configuration of the project"),
        ("CREATE STREAMING TABLE a AS SELECT * FROM STREAM json.`data/` WHERE 1 IN (SELECT id FROM range(3));", "t.sql:1"),
        ("@dp.table\ndef a():\n    spark.range(1).createOrReplaceTempView('r')\n    rows = spark.readStream.schema('id int')"
         ".json('data/')\n    return rows.where('id IN (SELECT id FROM r)')", "joins a stream with a table"),
        pytest.param(
            "CREATE STREAMING TABLE a FLOW AUTO CDC FROM STREAM(b) KEYS (id) SEQUENCE BY t;\n"
            "CREATE FLOW f AS INSERT INTO a BY NAME SELECT * FROM STREAM b;", "AUTO CDC, and can have no other flow",
            marks=CDC_IN_SQL),
        ("@dp.append_flow(target='b')\ndef a():\n    return spark.range(3)", "create_streaming_table\\('b'\\)"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, op string, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by='t', except_column_list=['opp'])",
         "t.py:11: b has no column 'opp'; it has id, op, t .*'op'"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, op string, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by='t', except_column_list=['ID'])",
         "t.py:11: AUTO CDC a: key 'id' is none of the columns that it keeps \\(op, t\\)"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, op string, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by='t', column_list=['op'])",
         "t.py:11: AUTO CDC a: key 'id' is none of the columns that it keeps \\(op\\)"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, op string, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id', 'ID'], sequence_by='t')",
         "t.py:11: AUTO CDC a: column 'id' is twice among its keys"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, op string, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by='t', apply_as_deletes='op')",
         "t.py:11: AUTO CDC a: APPLY AS DELETE WHEN is string, expected a condition"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, op string, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by=F.lit(1))",
         "t.py:11: AUTO CDC a: SEQUENCE BY .*1.* has no column in it"),
        ("@dp.materialized_view(schema='id int')\ndef a():\n    return spark.range(3)",
         "t.py:7: a: its schema says id int, and its query gives bigint: declare that, or write CAST\\(id AS INT\\)"),
        ("CREATE MATERIALIZED VIEW a (x BIGINT) AS SELECT 2.75D AS x;",
         "t.sql:1: a: its schema says x bigint, and its query gives double"),
        ("x = 1\ny = x / 0", "t.py:8: ZeroDivisionError"),
        ("x = 1\ny = = 2", "t.py:8: SyntaxError"),
        ("@dp.table(nme='a')\ndef a():\n    return spark.range(3)", "t.py:7: TypeError: .*nme"),
        ("CREATE MATERIALIZED VIEW a AS SELECT 1 AS x;\n\nSELECT 1 + 1;", "t.sql:3: 'SELECT 1 .*' defines no dataset: expected"),
        ("dp.create_sink('a', 'kafka', {})", "t.py:7: sink a: format 'kafka' is not one of parquet, delta"),
        ("dp.create_sink('a', 'parquet', {})", "sink a: format 'parquet' needs the option 'path'"),
        ("dp.create_sink('a', 'parquet', {'path': 'out', 'partitionBy': 'x'})", "option partitionBy has no meaning"),
        ("dp.create_sink('a', 'parquet', {'path': 'hdfs://host/out'})", "t.py:7: sink a: .*hdfs:// is not known"),
        ("dp.create_sink('a', 'parquet', {'path': 's3:/bucket/out'})", "sink a: s3:/bucket/out is not on this host"),
        ("dp.create_sink('a', 'parquet', {'path': 'out'})\ndp.create_sink('b', 'delta', {'path': './out'})\n"
         "for name in 'ab':\n    @dp.append_flow(target=name, name='to_' + name)\n    def f():\n        return spark.range(3)",
         "t.py:8: sink b writes to .*out, as a in .*t.py:7 does"),
        ("dp.create_sink('a', 'parquet', {'path': 'out'})", "nothing fills a"),
        ("dp.create_sink('a', 'parquet', {'path': 'out'})\n\n@dp.append_flow(target='a')\ndef f():\n    return spark.range(3)",
         "t.py:9: f reads no stream, and a sink is of rows as they come"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, t int').json('data/')\n"
         "dp.create_sink('a', 'parquet', {'path': 'out'})\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by='t')", "t.py:11: a is a sink, and AUTO CDC"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, t int').json('data/')\n"
         "dp.create_streaming_table('a')\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=[], sequence_by='t')", "t.py:11: AUTO CDC a has no keys"),
        ("@dp.table\ndef b():\n    return spark.readStream.schema('id int, t int').json('data/')\n"
         "@dp.materialized_view\ndef a():\n    return spark.range(3)\n"
         "dp.create_auto_cdc_flow(target='a', source='b', keys=['id'], sequence_by='t', name='f')",
         "t.py:13: a is a materialized view, and AUTO CDC"),
        ("@dp.materialized_view\ndef a():\n    return spark.range(3)\n\n@dp.append_flow(target='a')\ndef f():\n"
         "    return spark.range(3)", "t.py:11: a is a materialized view, which has the query that defines it alone"),
        ("dp.create_streaming_table('a')\n\n@dp.append_flow(target='a', name='f')\ndef f():\n    return spark.range(3)\n\n"
         "@dp.append_flow(target='a', name='F')\ndef g():\n    return spark.range(3)", "flow F is defined already, in .*t.py:9"),
        ("@dp.materialized_view(name='other.a')\ndef a():\n    return spark.range(3)", "not the project's"),
        ("@dp.materialized_view(name='a b')\ndef a():\n    return spark.range(3)", "t.py:7: dataset name 'a b'"),
        ("import nothing_such", "t.py:7: ModuleNotFoundError: No module named 'nothing_such'"),
        ("x = = 1", "t.py:7: SyntaxError"),
        ("@dp.materialized_view\ndef a():\n    return spark.range(3)\n\n"
         "@dp.materialized_view(name='A')\ndef c():\n    return spark.range(3)", "t.py:11: a is defined .*t.py:7"),
        ("CREATE MATERIALIZED VIEW a AS\nSELECT 1 AS x\nFRM b;", "t.sql: .*line 3"),
        ("CREATE TABLE a (x int);", "t.sql:1: .*expected CREATE MATERIALIZED VIEW"),
        ("-- one\n\nCREATE MATERIALIZED VIEW a AS\nSELECT id FROM range(3)\nWHERE rand() > 0.5;", "rand.*line 5"),
        ("CREATE MATERIALIZED VIEW a AS SELECT * FROM nowhere;", "nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_its_line(spark: SparkSession, tmp_path: Path, text: str, said: str) -> None:
    project = Project(tmp_path / "p", spark, t=text)
    with pytest.raises(nosync.NosyncError, match=f"(?s){said}"):
        project.declare()


@pytest.mark.long("make spark")
def test_inputs_have_names_that_another_order_does_not_change(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql("CREATE DATABASE raw")
    try:
        for name in ("a", "b"):
            spark.sql(f"CREATE TABLE raw.{name} USING parquet AS SELECT 1 AS id, '{name}' AS {name}_is")
        query = "SELECT * FROM raw.{} JOIN raw.{} USING (id) WHERE id IN (SELECT id FROM raw.a)"
        project = Project(tmp_path / "p", spark, q="CREATE MATERIALIZED VIEW q AS " + query.format("a", "b"))
        names = [one.name for one in project.declare().inputs]
        assert names == ["spark_catalog-raw-a", "spark_catalog-raw-b"]
        project.run()
        assert project.rows("q") == counted(("a", "b", 1))
        project.write("q", "CREATE MATERIALIZED VIEW q AS " + query.format("b", "a"))
        assert [one.rows_in for one in project.run().epochs] == [0], "no row of the tables comes again"
        assert project.rows("q") == counted(("a", "b", 1))
    finally:
        spark.sql("DROP DATABASE raw CASCADE")
    two = "@dp.table\ndef a():\n    def of(name):\n        return spark.readStream.schema(f'x int, {name} int').json('data/')\n"
    project = Project(tmp_path / "two", spark, two=two + "    return of('y').join(of('z'), 'x')\n")
    with pytest.raises(nosync.FlowError, match="define each as a dataset of its own"):
        project.declare()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("name: x\n", "storage"),
        ("name: x\nstorage: s\nlibrarys: []\n", "librarys"),
        ("name: [x\n", "spark-pipeline.yml|no spec"),
        ("", "no spec"),
        ("name: x\nstorage: s\nlibraries:\n  - glob:\n      include: nothing/**\n", "no file matches"),
        ("name: x\nstorage: s\nlibraries:\n  - glob:\n      include: '*/a/*.py'\n", "glob"),
    ],
)
def test_a_mistake_in_the_spec_is_named(spark: SparkSession, tmp_path: Path, spec: str, said: str) -> None:
    project = Project(tmp_path / "p", spark)
    (project.root / "spark-pipeline.yml").write_text(spec)
    with pytest.raises(nosync.InvalidInputError, match=said):
        project.declare()


@CDC_IN_SQL
def test_a_null_sequence_is_an_error_that_names_the_flow(spark: SparkSession, tmp_path: Path) -> None:
    feed = MORE[: MORE.index("@dp.materialized_view")]
    cdc = "CREATE STREAMING TABLE people FLOW AUTO CDC FROM STREAM(feed_input) KEYS (customer) SEQUENCE BY seq;"
    project = Project(tmp_path / "p", spark, feed=feed, cdc=cdc)
    project.give("feed", [{"customer": "ann", "city": "Rome", "op": "U"}])
    with pytest.raises(nosync.NosyncError, match=r"AUTO CDC people: SEQUENCE BY is null"):
        project.run()


def test_a_time_zone_that_only_files_would_be_read_in_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    project = Project(tmp_path, spark, t="@dp.materialized_view\ndef a():\n    return spark.range(3)")
    spec = tmp_path / "spark-pipeline.yml"
    text = spec.read_text()
    for zone in ("Europe/Rome", "+01:00"):
        spec.write_text(f"{text}configuration:\n  spark.sql.session.timezone: '{zone}'\n")
        with pytest.raises(
            nosync.InvalidInputError, match="spark-pipeline.yml: spark.sql.session.timezone is .*in UTC"
        ):
            project.run()
    spec.write_text(f"{text}configuration:\n  spark.sql.session.timeZone: UTC\n")
    project.run()


STATEFUL = {
    "duplicates": (
        "    rows = spark.readStream.schema('k string, n int').json('data/s')\n"
        "    return rows{}.dropDuplicates(['k']).select('k', F.upper('k').alias('u'))",
        ".where('n > 0')",
    ),
    "windows": (
        "    rows = spark.readStream.schema('k string, n int, at timestamp').json('data/s')\n"
        "    windows = rows{}.withWatermark('at', '1 hour').groupBy('k', F.window('at', '1 hour'))\n"
        "    return windows.agg(F.sum('n').alias('n')).select('k', 'n')",
        ".where('n > 0')",
    ),
}


@pytest.mark.parametrize("what", list(STATEFUL))
def test_an_edit_that_would_lose_the_state_of_a_streaming_table_is_refused(
    spark: SparkSession, tmp_path: Path, what: str
) -> None:
    text, edit = STATEFUL[what]
    project = Project(tmp_path, spark, t="@dp.table\ndef s():\n" + text.format(""))
    project.give("s", [{"k": "a", "n": 1, "at": "2026-01-01T00:00:00Z"}])
    project.run()
    project.write("t", "@dp.table\ndef s():\n" + text.format(edit))
    with pytest.raises(nosync.FlowError, match="stage s goes on from what it gave, .* would begin with no state"):
        project.run()
    after = ".where(\"u <> 'B'\")" if what == "duplicates" else ".where('n > 2')"
    project.write("t", "@dp.table\ndef s():\n" + text.format("") + after)
    project.give(
        "s", [{"k": "a", "n": 2, "at": "2026-01-01T00:00:01Z"}, {"k": "b", "n": 2, "at": "2026-01-01T09:00:00Z"}]
    )
    project.run()
    project.give("s", [{"k": "b", "n": 3, "at": "2026-01-02T00:00:00Z"}])
    project.run()
    assert project.rows("s") == counted(("a", "A") if what == "duplicates" else ("a", 3))


def test_an_input_that_two_datasets_read_stays_that_of_both(spark: SparkSession, tmp_path: Path) -> None:
    """It has the name of the first that reads it: an edit of that one would let the other read it from its beginning."""
    read = "spark.readStream.schema('k string').json('data/s')"
    other = "@dp.table\ndef b():\n    return " + read.replace("data/s", "data/{}")
    project = Project(tmp_path, spark, t=f"@dp.table\ndef a():\n    return {read}\n\n{other.format('s')}")
    for stream in "su":
        project.give(stream, [{"k": stream}])
    project.run()
    edited = read.replace(".schema", ".option('maxFilesPerTrigger', 10).schema")
    project.write("t", f"@dp.table\ndef a():\n    return {edited}\n\n{other.format('s')}")
    with pytest.raises(
        nosync.FlowError, match=r"t.py:11: b has rows already, .* as input b-input, which it did not before"
    ):
        project.run()
    project.write("t", f"@dp.table\ndef a():\n    return {read}\n\n{other.format('s')}.where(\"k <> 'x'\")")
    project.give("s", [{"k": "x"}])
    project.run()
    assert (project.rows("a"), project.rows("b")) == (counted(("s",), ("x",)), counted(("s",)))
    project.write("t", other.format("s"))  # the first of them is taken out
    with pytest.raises(nosync.FlowError, match="define a temporary view a that reads it as before"):
        project.run()
    project.write("t", f"@dp.temporary_view\ndef a():\n    return {read}\n\n{other.format('s')}")
    project.give("s", [{"k": "y"}])
    project.run()
    assert project.rows("b") == counted(("s",), ("y",)), "what it had stays, and what came is there once"


def test_a_dataset_does_not_go_on_with_the_offsets_of_another(spark: SparkSession, tmp_path: Path) -> None:
    text = "@dp.table\ndef {}():\n    return spark.readStream.schema('k string').json('data/{}/*')\n\n"
    project = Project(tmp_path, spark, t=text.format("a", "s") + text.format("b", "u"))
    for stream in "su":
        project.give(stream, [{"k": stream}])
    project.run()
    project.write("t", text.format("a", "u") + text.format("b", "u"))
    with pytest.raises(nosync.FlowError, match="b has rows already, .* as input a-input, which it did not before"):
        project.run()


@pytest.mark.long
def test_instants_stay_instants_where_a_timestamp_is_one_without_a_zone(spark: SparkSession, tmp_path: Path) -> None:
    read = "spark.readStream.schema('k string, t timestamp_ltz, s struct<t: timestamp_ltz>, n timestamp_ntz').json('data/s')"
    project = Project(
        tmp_path, spark,
        a=f"@dp.table\ndef a():\n    return {read}",
        b="CREATE MATERIALIZED VIEW b (k STRING, t TIMESTAMP_LTZ, n TIMESTAMP) AS SELECT k, t, n FROM a;",
    )  # fmt: skip
    project.give(
        "s", [{"k": "x", "t": "2026-01-01T00:00:00Z", "s": {"t": "2026-01-01T00:00:00Z"}, "n": "2026-01-01T00:00:00"}]
    )
    with conf_set(spark, {"spark.sql.timestampType": "TIMESTAMP_NTZ"}):
        project.run()
    with nosync.open(tmp_path / "store", read_only=True) as store:
        assert str(store.schema("a").field("t").type) == "timestamp[us, tz=UTC]"
        assert str(store.schema("b").field("t").type) == "timestamp[us, tz=UTC]"
        assert str(store.schema("b").field("n").type) == "timestamp[us]"
    # Sources are known by their text, which is as it was in stores of earlier versions elsewhere.
    assert "`t` TIMESTAMP," in str(project.declare().flow["a-input"].schema)


TWO = """@dp.table
def x():
    return spark.readStream.schema('k string, n int, at timestamp').json('data/s')
@dp.table
def y():
    return spark.readStream.schema('j string, seen timestamp').json('data/u')
"""
JOIN = """@dp.table
def s():
    left = spark.readStream.table('x'){}.withWatermark('at', '1 hour')
    right = spark.readStream.table('y').withWatermark('seen', '1 hour')
    return left.join(right, F.expr('k = j AND seen BETWEEN at AND at + INTERVAL 1 HOUR')).select('k', 'seen')
"""
TO_SINK = """dp.create_sink('s', 'parquet', {{'path': 'out'}})
@dp.append_flow(target='s')
def f():
    return spark.readStream.table('x'){}.dropDuplicates(['k']).select('k', F.upper('k').alias('u'))
"""


@pytest.mark.long
@pytest.mark.parametrize(("text", "operator"), [(JOIN, "join"), (TO_SINK, "dedupe")])
def test_so_is_one_of_a_join_and_one_of_a_sink(spark: SparkSession, tmp_path: Path, text: str, operator: str) -> None:
    project = Project(tmp_path, spark, t=TWO + text.format(""))
    project.give("s", [{"k": "a", "n": 1, "at": "2026-01-01T00:00:00Z"}])
    project.give("u", [{"j": "b", "seen": "2026-01-01T00:00:00Z"}])
    project.run()
    project.write("t", TWO + text.format(".where('n > 0')"))
    with pytest.raises(
        nosync.FlowError, match=f"stage s goes on from what it gave, .* its {operator} would begin with no"
    ):
        project.run()


def test_a_run_whose_epoch_fails_prints_one_error(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's Python side, and Py4J, print what a batch raised as well, with traces."""
    text = (
        "@dp.table\ndef a():\n    return spark.readStream.schema('t string').json('data/a')\n\n"
        "@dp.materialized_view\ndef b():\n    return spark.table('a').selectExpr('cast(t AS int) AS n')\n"
    )
    project = Project(tmp_path / "p", spark, t=text)
    project.give("a", [{"t": "no number"}])
    command = [sys.executable, "-m", "nosync.cli", "run", str(project.root), "--store", str(tmp_path / "s")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "CAST_INVALID_INPUT" in line
