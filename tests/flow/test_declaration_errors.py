"""A wrong name is told in the call that declares it, with the nearest right one, before there is a session."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import nosync
from nosync.flow.ddl import columns_of

FLIGHTS = "origin string, carrier string, dep_delay double, at timestamp, tags map<string, string>"


def flights() -> nosync.Stage:
    return nosync.Dataflow("f").source("flights", FLIGHTS)


def other(columns: str, stage: nosync.Stage) -> nosync.Stage:
    return stage.flow.source("other", columns)


COUNT = {"n": nosync.count()}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("k strng", "source rows: 'k strng' .*column 'k' is of type 'strng'.*did you mean 'string'"),
        ("k string, n int64", "'int64', which Spark does not have .did you mean 'bigint'"),
        ("k str", "did you mean 'string'"),
        ("k string, a array<bigin>", "an element of column 'a' is of type 'bigin'.*did you mean 'bigint'"),
        ("k string, a struct<x: dubble>", "column 'x' is of type 'dubble'.*did you mean 'double'"),
        ("k frobnicate", r"'frobnicate', which Spark does not have$"),
        ("k string n bigint", "expected a comma before 'n'"),
        ("k string,", "expected the name of a column, found the end"),
        ("k", "column 'k' has no type, such as k string"),
        ("a-b string", "'-' cannot be part of it"),
        ("a array<string", "expected '>' after array<..., found the end"),
        ("a decimal(40, 2)", "expected up to 38 digits"),
        ("", "no columns are declared"),
        ("k string, k bigint", "two columns of .* are named 'k'"),
        ("k string, _epoch bigint", "column '_epoch' has a name that nosync uses itself"),
        (7, "the columns are a int, expected text such as"),
        (SimpleNamespace(simpleString=str), r"simpleString\(\) is that of a StructType"),
    ],
)
def test_the_columns_of_a_source(columns: Any, message: str) -> None:
    with pytest.raises(nosync.SchemaError, match=message):
        nosync.Dataflow("f").source("rows", columns)


def test_columns_of_state_and_of_functions() -> None:
    with pytest.raises(nosync.SchemaError, match="stage s: state=: .*'bigin'.*did you mean 'bigint'"):
        flights().update("s", key=["origin"], state="total bigin", fn=lambda new, old: old)
    with pytest.raises(nosync.SchemaError, match="stage s: state column 'origin' is a key column"):
        flights().update("s", key=["origin"], state="origin string", fn=lambda new, old: old)
    with pytest.raises(nosync.SchemaError, match="stage m: schema=: .*'strin'.*did you mean 'string'"):
        flights().map("m", lambda rows: rows, schema="k strin")


Declare = Callable[[nosync.Stage], object]
WRONG: list[tuple[str, Declare, str]] = [
    ("a key", lambda s: s.aggregate("d", key=["orign"], **COUNT), "key column 'orign'.*did you mean 'origin'"),
    ("its case", lambda s: s.aggregate("d", key=["Origin"], **COUNT), "key column 'Origin'.*did you mean 'origin'"),
    ("a key of dedupe", lambda s: s.dedupe("d", key=["orign"]), "did you mean 'origin'"),
    ("a key of a state", lambda s: s.update("d", key=["orign"], state="n int", fn=lambda a, b: b), "mean 'origin'"),
    ("a key's type", lambda s: s.aggregate("d", key=["tags"], **COUNT), "key column 'tags'"),
    ("a key that is no name", lambda s: s.aggregate("d", key=[1], **COUNT), "expected .* column names"),  # type: ignore[list-item]
    ("an aggregate's column", lambda s: s.aggregate("d", key=["origin"], n=nosync.sum("dep_dely")), "mean 'dep_delay'"),
    ("its type", lambda s: s.aggregate("d", key=["origin"], n=nosync.sum("carrier")), "is string, expected a number"),
    ("by=", lambda s: s.aggregate("d", key=["origin"], n=nosync.last("carrier", by="att")), "'att'.*did you mean 'at'"),
    ("one without a column", lambda s: s.aggregate("d", key=["origin"], n=nosync.sum(3)), "column is 3, expected the"),  # type: ignore[arg-type]
    ("a key as aggregate", lambda s: s.aggregate("d", key=["origin"], origin=nosync.count()), "cannot name an aggregate"),
    ("a text", lambda s: s.aggregate("d", key=["origin"], n="count"), r"use n=nosync.count\(\)"),  # type: ignore[arg-type]
    ("SQL", lambda s: s.aggregate("d", key=["origin"], n="avg(dep_delay)"), "use n=nosync.mean"),  # type: ignore[arg-type]
    ("a function", lambda s: s.aggregate("d", key=["origin"], n=nosync.max), "not called: use n=nosync.max"),  # type: ignore[arg-type]
    ("another's", lambda s: s.aggregate("d", key=["origin"], n=sum), "not an aggregate of nosync: use n=nosync.sum"),  # type: ignore[arg-type]
    ("a number", lambda s: s.aggregate("d", key=["origin"], n=7), "n= is 7, which is not an aggregate"),  # type: ignore[arg-type]
    ("none", lambda s: s.aggregate("d", key=["origin"]), "give at least one aggregate"),
    ("a window over text", lambda s: s.window("d", time="carrier", size="1 hour", **COUNT), "'carrier' is string, expected"),
    ("its time", lambda s: s.window("d", time="att", size="1 hour", **COUNT), "time column 'att'.*did you mean 'at'"),
    ("its key", lambda s: s.window("d", key=["orign"], time="at", size="1 hour", **COUNT), "did you mean 'origin'"),
    ("its bounds", lambda s: s.window("d", time="at", size="1 hour", window_end=nosync.count()), "cannot name an agg"),
    ("a session", lambda s: s.window("d", time="at", gap="1 hour", **COUNT), "a session window needs a key"),
    ("a name twice", lambda s: s.select("d", "origin", "carrier AS origin"), "two of its columns have the same name, 'origin'"),
    ("beside a star", lambda s: s.select("d", "*", "1 AS carrier"), "two of its columns have the same name, 'carrier'"),
    ("an expression", lambda s: s.select("d", "orign"), "column 'orign'.*did you mean 'origin'"),
    ("after a select", lambda s: s.select("x", "origin AS o").dedupe("d", key=["origin"]), "not in its input x .o string"),
    ("after a where", lambda s: s.where("x", "dep_delay > 0").dedupe("d", key=["orign"]), "did you mean 'origin'"),
    ("after an aggregate", lambda s: s.aggregate("x", key=["at"], late=nosync.count()).dedupe("d", key=["lat"]), "'late'"),
    ("after a window", lambda s: s.window("x", time="at", size="1 day", **COUNT).dedupe("d", key=["window_strt"]), "_start'"),
    ("after late rows", lambda s: s.window("x", time="at", size="1 day", **COUNT).late.dedupe("d", key=["orign"]), "'origin'"),
    ("after a state", lambda s: s.update("x", key=["at"], state="city string", fn=max).dedupe("d", key=["cty"]), "'city'"),
    ("after a union", lambda s: s.union("x", s).dedupe("d", key=["orign"]), "did you mean 'origin'"),
    ("in a union", lambda s: s.union("d", other("origin string", s)), "its inputs have different columns"),
    ("both sides", lambda s: s.join("d", other("origin string, carrier int", s), on=["origin"]), "both have a column 'carrier'"),
    ("a side", lambda s: s.join("d", other("orign string", s), on=["origin"]), "not in its input other.*did you mean 'orign'"),
    ("two types", lambda s: s.join("d", other("origin int", s), on=["origin"]), "is string in flights and int32 in other"),
]  # fmt: skip


@pytest.mark.parametrize(("declare", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_the_call_with_the_mistake_says_so(declare: Declare, message: str) -> None:
    stage = flights()
    with pytest.raises((nosync.FlowError, nosync.SchemaError), match=message):
        declare(stage)
    assert "d" not in [declared.name for declared in stage.flow.stages]


def test_what_only_spark_can_tell_is_left_to_the_job() -> None:
    rows = flights()
    rows.map("m", lambda table: table).aggregate("of_map", key=["made"], n=nosync.sum("made_too"))
    rows.select("s", "upper(origin)", "carrier").dedupe("of_select", key=["upper(origin)"])
    rows.select("lateral", "dep_delay AS delay", "delay AS again", "current_date AS today").dedupe("l", key=["again"])
    rows.select("commented", "origin -- AS x").dedupe("of_comment", key=["y"])
    rows.select("upper", "ORIGIN").dedupe("of_case", key=["ORIGIN"])
    stamped = rows.flow.source("stamped", "at timestamp_ntz, seen date, c char(3)")
    rows.join("stamps", stamped, on=["at"])  # a setting says whether timestamps have a zone
    stamped.window("days", time="seen", size="1 day", **COUNT)
    declared = {stage.name for stage in rows.flow.stages}
    assert declared >= {"of_map", "of_select", "l", "of_comment", "of_case", "stamps", "days"}
    rows.aggregate("by_of_map", key=["origin"], n=nosync.count()).map("n", lambda t: t).dedupe("o", key=["p"])


def test_a_branch_is_told_in_the_call_that_changes_it() -> None:
    flow = nosync.Dataflow("f")
    priced = flow.source("orders", "item string, price double").select("priced", "item", "price * 2 AS total")
    priced.aggregate("sums", key=["item"], total=nosync.sum("total"))
    with pytest.raises(
        nosync.SchemaError, match="stage sums: .*'total' is not in its input priced.*did you mean 'totl'"
    ):
        flow.changed({"priced": ["item", "price AS totl"]})
    with pytest.raises(nosync.FlowError, match=r"stage sums: total= is 'sum', which is not an aggregate"):
        flow.changed({"sums": {"total": "sum"}})
    with pytest.raises(nosync.UnknownStageError, match="did you mean 'sums'"):
        flow.changed({"sumz": {"total": nosync.count()}})


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("groupBy", "aggregate.*key="), ("agg", "aggregate"), ("keyBy", "aggregate"), ("withColumn", "select"),
        ("withWatermark", "window.*watermark="), ("assign_timestamps_and_watermarks", "window"), ("show", "job.read"),
        ("dropDuplicates", "dedupe"), ("writeStream", "sinks="), ("orderBy", "top_k"), ("unionByName", "union"),
        ("transformWithState", "update"), ("mapInPandas", "map"), ("cache", "persist="), ("explode", "flat_map"),
        ("crossJoin", "join_static"), ("agregate", "did you mean aggregate"), ("frob", "it has aggregate, dedupe"),
    ],
)  # fmt: skip
def test_words_of_others_on_a_stage(word: str, answer: str) -> None:
    with pytest.raises(nosync.FlowError, match=f"stage flights has no '{word}': .*{answer}"):
        getattr(flights(), word)
    assert not hasattr(flights(), word)


def test_words_of_others_on_a_flow_and_on_the_module() -> None:
    flow = nosync.Dataflow("f")
    for word, answer in (("readStream", "source"), ("execute", "job.advance"), ("sorce", "did you mean source")):
        with pytest.raises(nosync.FlowError, match=f"dataflow f has no '{word}': .*{answer}"):
            getattr(flow, word)
    with pytest.raises(AttributeError, match="it is called nosync.mean here"):
        nosync.avg  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'Dataflow'"):
        nosync.DataFlow  # noqa: B018
    assert copy.deepcopy(flow).name == "f"


def test_no_session_is_needed_for_it() -> None:
    code = """
import sys, nosync
try:
    nosync.Dataflow("f").source("rows", "k strng")
except nosync.SchemaError as error:
    print(error)
print("pyspark" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "did you mean 'string'" in done.stdout
    assert done.stdout.endswith("False\n")


def test_struct_in_brackets_is_its_columns() -> None:
    assert columns_of("struct<a: int, `b c`: string>", "x") == columns_of("a int, `b c` string", "x")


@pytest.mark.parametrize(
    "condition",
    [
        "carier = 'AA'",
        "dep_delay > 10 AND orign IS NOT NULL",
        "`dep delay` > 1",
        "dep_delay + delay > 3",
        "(dep_delay > 1) or dest = 'x'",
        "NOT cancelled",
        "carrier IN ('AA', code)",
        "dep_delay BETWEEN low AND 3.5",
        "carrier LIKE 'A%' AND tail LIKE 'N%'",
    ],
)
def test_an_unknown_column_of_a_plain_condition(condition: str) -> None:
    with pytest.raises(
        nosync.SchemaError, match=r"stage late: column '.+' is not in its input flights \(origin string"
    ):
        flights().where("late", condition)


@pytest.mark.parametrize(
    "condition",
    [
        "carrier = 'AA' AND dep_delay > 1e3",
        "ORIGIN = 'JFK' OR `at` IS NULL",
        "tags['x'] = 'y'",
        "true",
        "upper(carrier) = code",
        "at > timestamp '2013-01-01'",
        "at > date'2013-01-01' + interval 1 day",
        "cast(dep_delay AS int) = 1",
        "x'1f' = carrier",
        "CASE WHEN dep_delay > 1 THEN true ELSE false END",
        'carrier = "AA"',
        "dep_delay > 1 -- minutes",
        "carrier RLIKE 'A.*'",
        "extract(year FROM at) = 2013",
        "now() > at",
        "current_date > at",
        "carrier = 'it\\'s'",
        "dep_delay > 10L",
        "dep_delay is distinct from 1",
    ],
)
def test_conditions_that_may_be_right_are_left_to_spark(condition: str) -> None:
    assert flights().where("late", condition).kind == "where"


def test_a_condition_over_what_only_the_job_knows_is_left_to_spark() -> None:
    assert flights().map("mapped", lambda rows: rows).where("late", "dely > 10").inputs == ("mapped",)


def test_a_field_of_a_long_name_is_read_at_once() -> None:
    """Words were once cut in all ways to understand the dot: twice the time for each character."""
    condition = f"{'address_of_the_customer' * 4}.city = 'Bern' AND (((dep_delay > 10)))"
    assert flights().where("late", condition).kind == "where"


def test_a_function_in_the_place_of_an_expression() -> None:
    with pytest.raises(
        nosync.FlowError, match=r"stage late: <lambda> is a function of Python.*filter\('late', <lambda>\)"
    ):
        flights().where("late", lambda rows: rows["dep_delay"])
    with pytest.raises(nosync.FlowError, match=r"stage sel: len is a function of Python.*map\('sel', len\)"):
        flights().select("sel", "origin", len)
