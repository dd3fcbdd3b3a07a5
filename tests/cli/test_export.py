"""What leaves a store by the command line: changes, files of other formats, and a branch that becomes main."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import nosync
from nosync.testing import FlowTester
from tests.cli.test_commands import answer, run
from tests.helpers.clocks import NOON_US, SECOND_US, Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEY = ["origin"]
READ = Path(__file__).parents[2] / "docs/read.md"


def rows(t: int, shard: int) -> pa.Table:
    return pa.table(
        {"origin": [f"JFK{shard}", f"LGA{shard}"], "n": [t, 10 * t], "tags": [[1], []], "raw": [b"\x00", None]}
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Five epochs, a minute each from noon on, in two shards; LGA1 goes with the last one."""
    clock = Clock()
    with nosync.open(tmp_path / "s", env=clock, settings=nosync.StoreSettings(background=False)) as store:
        for t in range(5):
            clock.now_us = NOON_US + t * 60 * SECOND_US
            for shard in range(2):
                gone = pa.table({"origin": ["LGA1"]}) if (t, shard) == (4, 1) else None
                given = rows(t, shard) if gone is None else rows(t, shard).slice(0, 1)
                store.append("delays", t=t, shard=shard, rows=given, key=KEY, deletes=gone)
            store.seal(t)
    return str(tmp_path / "s")


# --- changes ----------------------------------------------------------------------------------------------------------


def test_changes_are_those_of_the_store_in_order(capsys: pytest.CaptureFixture[str], path: str) -> None:
    found = answer(capsys, "changes", path, "delays")
    with nosync.open(path, read_only=True) as store:
        expected = store.changes("delays", -1, 4)
    assert len(found) == expected.num_rows
    assert [row["_epoch"] for row in found] == sorted(row["_epoch"] for row in found)
    of_one = [(row["_epoch"], row["_change_type"]) for row in found if row["origin"] == "LGA1"]
    assert of_one == [
        (0, "insert"), (1, "update_preimage"), (1, "update_postimage"), (2, "update_preimage"), (2, "update_postimage"),
        (3, "update_preimage"), (3, "update_postimage"), (4, "delete"),
    ]  # fmt: skip


def test_changes_from_and_to(capsys: pytest.CaptureFixture[str], path: str) -> None:
    by_epoch = answer(capsys, "changes", path, "delays", "--from", "2", "--to", "3")
    assert {row["_epoch"] for row in by_epoch} == {2, 3}
    assert (
        answer(capsys, "changes", path, "delays", "--from", "2026-07-04T12:01", "--to", "2026-07-04T12:03:59")
        == by_epoch
    )
    assert {
        row["_epoch"] for row in answer(capsys, "changes", path, "delays", "--from", "2020-01-01", "--to", "0")
    } == {0}
    one = answer(capsys, "changes", path, "delays", "--key", "origin=LGA1", "--from", "4")
    assert [(row["origin"], row["_change_type"]) for row in one] == [("LGA1", "delete")]
    code, out, _ = run(capsys, "changes", path, "delays", "--limit", "1")
    assert (code, "more of 35 rows" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["delays", "--from", "3", "--to", "1"], "must not be after"),
        (["delays", "--to", "9"], "recorded up to 4"),
        (["delays", "--from", "-2"], "timestamp -2 is not an epoch number"),
        (["delays", "--from", "-1"], "timestamp -1 is not an epoch number"),
        (["nope"], "recorded stages: delays"),
        (["delays", "--key", "x=1"], "no column 'x'"),
        (["delays", "--from", "soon"], "neither the number of an epoch nor a time"),
    ],
)
def test_changes_that_cannot_be_are_one_clear_line(
    capsys: pytest.CaptureFixture[str], path: str, arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, "changes", path, *arguments)
    assert code in (1, 2)
    assert message in " ".join(err.split())


def test_changes_where_history_was_merged_begin_with_what_is_kept(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    run(capsys, "compact", path, "--retain", "1")
    assert {row["_epoch"] for row in answer(capsys, "changes", path, "delays")} == {4}
    code, _, err = run(capsys, "changes", path, "delays", "--from", "0")
    assert (code, "merged away" in " ".join(err.split())) == (1, True)


def test_expired_rows_are_shown_where_that_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k string").update_per_key("seen", key=["k"], state="n bigint", fn=lambda *_: {"n": 1}, ttl=1)
    with FlowTester(flow) as tester:
        tester.advance({"rows": [("a",)]})
        for _ in range(3):
            tester.advance()
        path = str(tester._store.directory.root)
        kinds = [row["_change_type"] for row in answer(capsys, "changes", path, "seen")]
        assert kinds == ["insert"]
        asked = answer(capsys, "changes", path, "seen", "--include-expired")
        assert [row["_change_type"] for row in asked] == ["insert", "expire"]
        assert tester.changes("seen", -1, include_expired=True).num_rows == 2


# --- export -----------------------------------------------------------------------------------------------------------


def test_parquet_is_the_state(capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    said = answer(capsys, "export", path, "delays", str(target), "--as-of", "2026-07-04T12:02")
    with nosync.open(path, read_only=True) as store:
        assert pq.read_table(target).equals(store.read("delays", 2))
    assert said == {"file": str(target), "stage": "delays", "epoch": 2, "rows": 4, "bytes": target.stat().st_size}
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_csv_has_text_for_what_csv_does_not_have(capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    code, out, _ = run(capsys, "export", path, "delays", str(target))
    assert (code, "wrote 3 rows of stage delays as of epoch 4" in out) == (0, True)
    found = sorted(csv.DictReader(io.StringIO(target.read_text())), key=lambda row: row["origin"])
    assert found[0] == {"origin": "JFK0", "n": "4", "tags": "[1]", "raw": "AA=="}
    assert [row["origin"] for row in found] == ["JFK0", "JFK1", "LGA0"]


def test_a_stage_without_rows_has_its_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s") as store:
        store.append("empty", t=0, rows=pa.table({"k": pa.array([], pa.int64())}), key=["k"])
        store.seal(0)
    for suffix, read in ((".parquet", pq.read_table), (".csv", pyarrow.csv.read_csv)):
        target = tmp_path / f"out{suffix}"
        assert answer(capsys, "export", str(tmp_path / "s"), "empty", str(target))["rows"] == 0
        assert (read(target).column_names, read(target).num_rows) == (["k"], 0)


def test_nothing_is_overwritten_without_force(capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("mine")
    code, _, err = run(capsys, "export", path, "delays", str(target))
    assert (code, "say --force to replace it" in " ".join(err.split())) == (1, True)
    assert target.read_text() == "mine"
    assert answer(capsys, "export", path, "delays", str(target), "--force")["rows"] == 3
    assert target.read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["delays", "out.xlsx"], "give a name in .parquet or .csv"),
        (["delays", "no/such/out.csv"], "no/such/out.csv"),
        (["nope", "out.csv"], "recorded stages: delays"),
        (["delays", "out.csv", "--as-of", "2020-01-01"], "its first is epoch 0"),
    ],
)
def test_an_export_that_cannot_be_leaves_nothing(
    capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*.csv"))
    code, _, err = run(capsys, "export", path, *arguments)
    assert (code, message in " ".join(err.split())) == (1, True), err
    assert sorted(tmp_path.rglob("*.csv")) == before
    assert list(tmp_path.glob(".*")) == []


def test_a_column_that_parquet_does_not_have_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s") as store:
        spans = pa.array([pa.scalar((1, 2, 3), pa.month_day_nano_interval())])
        store.append("spans", t=0, rows=pa.table({"k": [1], "span": spans}), key=["k"])
        store.seal(0)
    code, _, err = run(capsys, "export", str(tmp_path / "s"), "spans", str(tmp_path / "out.parquet"))
    assert (code, "stage spans cannot be written as Parquet" in " ".join(err.split())) == (1, True)
    assert not (tmp_path / "out.parquet").exists()


# --- promote ----------------------------------------------------------------------------------------------------------


def branched(path: str) -> None:
    """A branch at epoch 4, which has come as far as main, and one at 2, which has not."""
    with nosync.open(path, settings=nosync.StoreSettings(background=False)) as store:
        store.node.create_branch("same", "main", 4)
        store.node.create_branch("behind", "main", 2)


def test_a_branch_becomes_main_and_main_a_branch(capsys: pytest.CaptureFixture[str], path: str) -> None:
    branched(path)
    said = answer(capsys, "promote", path, "same")
    assert said == {"promoted": "same", "epoch": 4, "was": 4, "kept_as": "before-promote-3"}
    with nosync.open(path, read_only=True) as store:
        assert sorted(store.branches()) == ["before-promote-3", "behind", "main"]
        assert store.branches()["main"].id.startswith("same")
    code, out, _ = run(capsys, "promote", path, "before-promote-3", "--drop")
    assert (code, "what it was is deleted" in out) == (0, True)
    with nosync.open(path, read_only=True) as store:
        assert store.branches()["main"].id == "main"
        assert store.read("delays").num_rows == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["behind"], 1, "branch behind is at epoch 2, main at 4: replay() it first"),
        (["nope"], 1, "no branch 'nope'"),
        (["main"], 1, "main is the main timeline already"),
        (["same", "--keep-as", "behind"], 1, "exists already"),
        (["same", "--keep-as", "x", "--drop"], 2, "leave out --keep-as"),
    ],
)
def test_what_cannot_be_promoted_changes_nothing(
    capsys: pytest.CaptureFixture[str], path: str, arguments: list[str], code: int, message: str
) -> None:
    branched(path)
    shutil.copytree(Path(path) / "branches", Path(path).parent / "before")
    found, _, err = run(capsys, "promote", path, *arguments)
    assert (found, message in " ".join(err.split())) == (code, True), err
    names = [
        sorted(one.name for one in where.iterdir()) for where in (Path(path) / "branches", Path(path).parent / "before")
    ]
    assert names[0] == names[1]


def test_commands_print_json(capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path) -> None:
    for words in (["changes", path, "delays"], ["export", path, "delays", str(tmp_path / "a.csv")]):
        code, out, err = run(capsys, *words, "--json")
        assert (code, err) == (0, "")
        json.loads(out)


@pytest.mark.spark
def test_spark_reads_what_is_no_number_with_the_options_that_the_page_names(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (named,) = re.findall(r'`(\.option\("nanValue".*?\))`', " ".join(READ.read_text().split()))
    with nosync.open(tmp_path / "s") as store:
        given = pa.table({"k": list("abcd"), "v": [math.nan, math.inf, -math.inf, 1.5]})
        store.append("kv", t=0, rows=given, key=["k"])
        store.seal(0)
    assert run(capsys, "export", str(tmp_path / "s"), "kv", str(tmp_path / "kv.csv"))[0] == 0
    reader = spark.read.schema("k string, v double")
    for name, value in re.findall(r'option\("(\w+)", "(.*?)"\)', named):
        reader = reader.option(name, value)
    found = {row.k: row.v for row in reader.csv(str(tmp_path / "kv.csv"), header=True).collect()}
    assert math.isnan(found.pop("a"))
    assert found == {"b": math.inf, "c": -math.inf, "d": 1.5}
