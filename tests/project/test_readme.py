"""The code of README and of the pages of docs/ runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from nosync.cli import main
from nosync.replication.transport.client import client_of
from nosync.testing.daemon_cluster import eventually, free_ports
from tests.helpers.kafka import FORMAT, StandIn, brokers, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.spark


def run_page(
    name: str,
    blocks: int,
    replace: Mapping[str, str] = MappingProxyType({}),
    names: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Runs the code of a page of docs/, which has so many blocks. `names`: what the page takes for granted."""
    page = README.parent / "docs" / name
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(found) == blocks
    code = "\n".join(found)
    for old, new in replace.items():
        code = code.replace(old, new)
    exec(compile(code, str(page), "exec"), {"__name__": "page", **names})


def test_the_example(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert 15 <= len(code.splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "|   JFK|  1| 3.0|" in printed
    assert "update_postimage" in printed
    assert "recomputed      0" in printed


@pytest.mark.long
def test_the_streaming_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"customer": "ann", "amount": 3}\n{"customer": "bob", "amount": 4}\n')
    # The JVM of the test session was started in another directory.
    names = ("in/", "checkpoint/", "state/", "other-checkpoint/", "other-state/")
    paths = {f'"{name}"': repr(str(tmp_path / name)) for name in names}
    run_page("streaming.md", 8, paths | {'f"two-': f'f"{tmp_path}/two-'})
    printed = capsys.readouterr().out
    assert "backfill: 2 epochs, 0 to 1, 3 rows in" in printed
    assert "|     ann|     1|    3|" in printed
    assert printed.count("insert") == 2
    assert "|     bob|     1|" in printed
    assert (tmp_path / "out" / "epoch=0").is_dir()
    assert (tmp_path / "orders-table" / "_delta_log").is_dir()
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        assert shop.execute("SELECT customer, total FROM spending ORDER BY customer").fetchall() == [
            ("eve", 7),
            ("mia", 1),
        ]


def test_the_page_that_converts_a_streaming_job(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"customer": "ann", "amount": 3}\n{"customer": "bob", "amount": 4}\n')
    # The JVM of the test session was started in another directory.
    names = ("in/", "old-checkpoint/", "new-checkpoint/", "state/")
    run_page("convert.md", 4, {f'"{name}"': repr(str(tmp_path / name)) for name in names}, {"spark": spark})
    assert capsys.readouterr().out == "rows that differ: 0\n"


@pytest.mark.long
def test_the_page_on_kafka(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spark.dataSource.register(StandIn)
    monkeypatch.chdir(tmp_path)
    # The JVM of the test session was started in another directory.
    names = ("state/", "checkpoint/", "price-state/", "price-checkpoint/")
    paths = {f'"{name}"': repr(str(tmp_path / name)) for name in names}
    with brokers() as servers:

        def pay(**cents: int) -> None:
            paid = [(who, json.dumps({"customer": who, "amount": amount})) for who, amount in cents.items()]
            send(servers, "payments", paid)

        pay(ann=300, bob=400)
        paths["# An hour later, with more messages in the topic:"] = "pay(ann=250)"
        send(servers, "prices", [("tea", "12.5"), ("ink", "30"), ("pen", "2"), ("ink", None), ("tea", "14.5")])
        replaced = {"host:9092": servers, 'format("kafka")': f'format("{FORMAT}")', **paths}
        run_page("kafka.md", 5, replaced, {"pay": pay})
    printed = capsys.readouterr().out
    assert printed.count("|     ann|       1|300.0|") == 2
    assert '{"customer": "ann", "amount": 250}' in printed
    assert "|     ann|       2|  5.5|" in printed
    assert "|    1|14.5|" in printed


def test_the_page_that_fixes_a_bug(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("fix-a-bug.md", 6)
    printed = capsys.readouterr().out
    assert "|     ann|     2|503.0|update_postimage|     1|" in printed
    assert "branch fix: replays 2 epochs, 1 to 2" in printed
    assert "|     ann|changed|       2|       2|  503.0|    8.0|" in printed
    assert "they differ from epoch 1 on" in printed
    assert "|     ann|     3|  9.0|" in printed
    assert "goes on after epoch 3" in printed


def test_the_page_on_upgrades(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # The JVM of the test session was started in another directory.
    names = ("prices/", "checkpoint/", "state/")
    run_page("upgrade.md", 3, {f'"{name}"': repr(f"{tmp_path}/{name}") for name in names}, {"spark": spark})
    printed = capsys.readouterr().out
    assert "stage checked shard" in printed
    assert "| cup|  1|" in printed
    assert "prices.place" in printed
    assert "| Rome|  1|" in printed


def test_the_page_that_reads_a_store(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = str(tmp_path / "state")
    run_page("read.md", 5, {'"state/"': repr(state), "'state/'": repr(state)})
    printed = capsys.readouterr().out
    assert printed.count("| tea|  202|") == 3
    assert printed.count("| tea|  201|") == 1
    assert printed.count("| tea|  200|") == 1
    assert "|   2|" in printed
    for view in ("prices", "first_prices"):
        spark.sql(f"DROP VIEW {view}")


@pytest.mark.long
def test_the_page_on_sql(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("sql.md", 5)
    printed = capsys.readouterr().out
    assert "|Bern| 35.0|" in printed
    assert "view cities as of epoch 2: 1 rows, as Spark's query over its inputs gives" in printed
    assert "totals" in printed.split("note:")[0]
    assert "|Bern| 29.0|" in printed, "what the branch gives"
    assert "rows that come 5 minutes after the newest ones" in printed


def test_the_page_that_tests_a_flow() -> None:
    run_page("testing.md", 1)


@pytest.mark.long
def test_the_operators_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("operators.md", 14)
    printed = capsys.readouterr().out
    assert "|plain|        1|" in printed
    assert "| gold|        1|" in printed
    assert "|Oslo| 60.0|" in printed
    assert [node for node in "abc" if f"|   {node}|" in printed] == list("abc")


@pytest.mark.long
def test_the_tutorial(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("tutorial.md", 4)
    printed = capsys.readouterr().out
    assert "replays 6 epochs, 25 to 30" in printed
    assert "rank_was" in printed
    assert "JFK, carrier=HA, as of 21" in printed
    assert "keys changed" in printed


@pytest.mark.long
def test_the_page_of_daemons(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's three daemons, the job beside the first, its death, and the job beside the second."""
    text = (README.parent / "docs" / "daemons.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    started = re.findall(r"    nosync (daemon --node (n\d) --data (d\d) .*)", text)
    assert [node for _, node, _ in started] == ["n1", "n2", "n3"]
    ports = dict(zip(("7501", "7502", "7503"), map(str, free_ports(3)), strict=True))
    processes = {}
    monkeypatch.chdir(tmp_path)
    try:
        for line, node, data in started:
            command = re.sub(r":(750\d)", lambda m: f":{ports[m[1]]}", line)
            log = (tmp_path / f"{node}.log").open("wb")
            processes[node] = subprocess.Popen(
                [sys.executable, "-m", "nosync.cli", *command.split()], stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": str(README.parent)},
            )  # fmt: skip
            eventually(f"{node} serves", lambda data=data: (tmp_path / data / "daemon.json").exists())
        names: dict[str, object] = {"__name__": "page", "spark": spark}
        exec(compile(first, "daemons.md", "exec"), names)
        client = client_of(tmp_path / "d1")
        assert client is not None
        eventually("epoch 4 is safe", lambda: client.status().safe_point == 4)
        client.close()
        processes["n1"].kill()
        exec(compile(second, "daemons.md", "exec"), names)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    printed = capsys.readouterr().out
    assert "4 safe up to        4" in printed
    assert "layers lost       0" in printed
    assert "|   a|  6|" in printed


@pytest.mark.long
def test_the_what_if_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("what-if.md", 6)
    printed = capsys.readouterr().out
    assert "replays 2 epochs, 1 to 2" in printed
    assert "flights          source     2 rows of epochs 0-1" in printed
    assert "|   JFK|changed|        3|        2|  33.0|   2.0|" in printed
    assert "they differ from epoch 1 on" in printed
    assert "|   JFK|      3|33.0|\n+" in printed, "the only one above the other threshold"
    assert "|   EWR|      1| 7.0|" in printed


def test_the_page_about_copies(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket is a directory here; tests of `replication/remote` have real servers."""
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket"
    page = (README.parent / "docs" / "remote.md").read_text()
    code = page.replace("s3://state/words", url).replace('connect("s3://bucket/state")', f"connect({url!r})")
    first, second, third, fourth = re.findall(r"```python\n(.*?)```", code, re.DOTALL)
    names: dict[str, object] = {"__name__": "page", "spark": spark}
    exec(compile(first, "remote.md", "exec"), names)
    assert f"{url}: " in capsys.readouterr().out
    shutil.rmtree("state")
    command = re.search(r"^    nosync (restore \S+ \S+)$", page, re.MULTILINE)
    assert command is not None
    main(command[1].replace("s3://state/words", url).split())
    exec(compile(second, "remote.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "recomputed      0" in printed
    assert "|   a|  6|" in printed
    exec(compile(third, "remote.md", "exec"), names)
    exec(compile(fourth, "remote.md", "exec"), names)
