"""`nosync sql`, as a process: it starts a session of Spark, and stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import nosync

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sql") / "store"
    with nosync.open(root, settings=nosync.StoreSettings(background=False)) as store:
        for t in range(3):
            store.append(
                "delays", t=t, rows=pa.table({"origin": ["JFK", "LGA"], "mean": [1.5 + t, 2.0]}), key=["origin"]
            )
            store.append("by-day", t=t, rows=pa.table({"day": [t], "n": [10 * t]}), key=["day"])
            nanos = pa.array([t + 1], pa.timestamp("ns", "UTC"))
            store.append("nanos", t=t, rows=pa.table({"id": [t], "at": nanos}), key=["id"])
            store.append("odd", t=t, rows=pa.table({"id": [t], "n": pa.array([t], pa.uint8())}), key=["id"])
            store.seal(t)
    return root


def asked(*words: str) -> tuple[int, str, str]:
    ran = subprocess.run(
        [sys.executable, "-m", "nosync.cli", "sql", *words], capture_output=True, text=True, check=False, timeout=120
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_stages_are_joined_as_of_an_epoch(path: Path) -> None:
    query = "SELECT origin, mean, (SELECT sum(n) FROM `by-day`) AS n FROM delays ORDER BY mean DESC"
    code, out, err = asked(str(path), query, "--json", "--as-of", "1")
    assert code == 0, err
    assert json.loads(out) == [{"origin": "JFK", "mean": 2.5, "n": 10}, {"origin": "LGA", "mean": 2.0, "n": 10}]


def test_nothing_is_changed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "data.txt").write_text("data")
    code, out, err = asked(str(path), f"INSERT OVERWRITE DIRECTORY '{tmp_path}/victim' USING csv SELECT 1")
    assert (code, out) == (1, "")
    assert "changes something, and this only asks" in " ".join(err.split())
    assert "Traceback" not in err
    assert "\tat " not in err
    assert len(err.splitlines()) <= 5
    assert (tmp_path / "victim" / "data.txt").read_text() == "data"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["SELECT mea FROM delays"], "UNRESOLVED_COLUMN"),
        (["SELECT * FROM nanos"], "would lose data"),
        (["SELECT * FROM odd"], "TABLE_OR_VIEW_NOT_FOUND"),
        (["SELECT 1", "--as-of", "9"], "9"),
        (["SELECT 1", "--branch", "x"], "'x'"),
        (["SELECT 1", "--csv", "--json"], "two formats"),
    ],
)
def test_a_mistake_is_one_line(path: Path, words: list[str], said: str) -> None:
    code, out, err = asked(str(path), *words)
    assert code in (1, 2)
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert "\tat " not in err
    assert len(err.splitlines()) <= 5


@pytest.mark.long
def test_commands_that_take_a_flow_start_spark_where_it_has_views(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "store", settings=nosync.StoreSettings(background=False)) as store:
        store.append("totals", t=0, rows=pa.table({"item": ["tea"], "total": [3.0]}), key=["item"])
        store.seal(0)
    (tmp_path / "shop_job.py").write_text(
        "import nosync\n\n"
        "def make_flow():\n"
        "    flow = nosync.Dataflow('shop')\n"
        "    flow.source('orders', 'item string, price double')\n"
        "    flow.sql('totals', 'SELECT item, sum(price) AS total FROM orders GROUP BY itm')\n"
        "    return flow\n"
    )
    words = ["explain", str(tmp_path / "store"), "totals", "--key", "item=tea", "--flow", "shop_job:make_flow"]
    ran = subprocess.run(
        [sys.executable, "-m", "nosync.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert ran.returncode == 1
    assert "view totals: [UNRESOLVED_COLUMN" in ran.stderr, "it was read by Spark"
    assert "Traceback" not in ran.stderr
