"""Explanations through expressions of the JVM, windows, joins and loops; and the commands that need the code of a flow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_through_expressions_windows_and_joins(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("f")
    clicks = flow.source("clicks", "user string, page string, at timestamp")
    users = flow.source("users", "user string, country string")
    pages = clicks.where("no_bots", "page <> 'robots.txt'").select("shop", "user", "upper(page) AS page", "at")
    named = pages.join("named", users, on=["user"])
    named.aggregate("by_country", key=["country"], n=nosync.count())
    pages.window("hourly", time="at", size="1 hour", watermark="1 hour", key=["page"], n=nosync.count())
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)

    def advance(t: int, clicks: str, users: str) -> None:
        job.advance(t, {
            "clicks": spark.sql(f"SELECT user, page, CAST(at AS timestamp) AS at FROM VALUES {clicks} AS v(user, page, at)"),
            "users": spark.sql(f"SELECT * FROM VALUES {users} AS v(user, country)"),
        })  # fmt: skip

    advance(
        0,
        "('ann', 'a', '2024-01-01 10:05:00'), ('bob', 'robots.txt', '2024-01-01 10:06:00'), "
        "('ann', 'b', '2024-01-01 13:10:00')",
        "('ann', 'NO')",
    )
    advance(1, "('bob', 'a', '2024-01-01 10:50:00')", "('bob', 'SE'), ('eve', 'NO')")
    advance(2, "('eve', 'a', '2024-01-01 10:55:00'), ('ann', 'b', '2024-01-01 13:20:00')", "('zoe', 'NO')")

    found = job.explain("by_country", {"country": "NO"})
    assert found.exact
    assert found.value.to_pylist() == [{"country": "NO", "n": 4}]
    clicked = sorted((r["user"], r["page"], r["_epoch"]) for r in found.inputs["clicks"].to_pylist())
    assert clicked == [("ann", "a", 0), ("ann", "b", 0), ("ann", "b", 2), ("eve", "a", 2)]
    assert sorted(r["user"] for r in found.inputs["users"].to_pylist()) == ["ann", "eve"], "zoe clicked nothing"

    windows = job.explain("hourly", {"page": "A"})
    # Eve's click of 10:55 came an epoch after the watermark had passed 12: it was too late for the window.
    assert sorted(r["user"] for r in windows.inputs["clicks"].to_pylist()) == ["ann", "bob"]
    assert windows.value.to_pylist()[0]["n"] == 2
    assert "users" not in windows.inputs
    assert "10:05" in windows._repr_html_()


@pytest.mark.long
def test_a_loop_says_that_it_is_not_exact(spark: SparkSession, open_store: OpenStore) -> None:
    flow = nosync.Dataflow("reach")
    edges = flow.source("edges", "a string, b string")
    start = flow.source("start", "node string")

    def step(known: nosync.Stage) -> nosync.Stage:
        moved = known.join("hop", edges.select("by_a", "a AS node", "b"), on=["node"]).select("there", "b AS node")
        return moved.union("grown", start)

    start.iterate("reached", step)
    job = nosync.Job(flow, open_store(), spark=spark, shards=2)
    rows = {"edges": spark.sql("SELECT 'x' AS a, 'y' AS b"), "start": spark.sql("SELECT 'x' AS node")}
    job.advance(0, rows)
    found = job.explain("reached", {"node": "y"})
    assert not found.exact
    assert found.inputs["edges"].num_rows == 1
    assert any("loop reached" in note for step_ in found.steps for note in step_.notes)
    html = job._repr_html_()
    assert "reached" in html
    assert "<script" not in html


FLOW = """
import nosync, pyarrow.compute as pc

def make(least=0):
    flow = nosync.Dataflow("f")
    kept = flow.source("rows", "k string, v bigint").map("kept", Above(least))
    kept.aggregate("sums", key=["k"], n=nosync.count(), total=nosync.sum("v"))
    return flow

class Above:
    def __init__(self, least):
        self.least = least

    def __call__(self, rows):
        return rows.filter(pc.greater(rows["v"], self.least))

def strict():
    return make(3)

number = 7
"""


Command = Callable[..., dict[str, Any]]


@pytest.fixture
def here(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """A command with --json, in this session and in the test's own directory, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("nosync.spark.session.local_session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)

    def run(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        main([*arguments, "--json"])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return run


@pytest.mark.long
def test_the_commands(spark: SparkSession, tmp_path: Path, here: Command) -> None:
    """As from a shell, in a directory with the flow's module in it; one of them really so, the others in this session."""
    (tmp_path / "my_job.py").write_text(FLOW)
    import my_job  # type: ignore[import-not-found]

    spark.sparkContext.addPyFile(str(tmp_path / "my_job.py"))

    with nosync.open(tmp_path / "s") as store:
        job = nosync.Job(my_job.make(), store, spark=spark, shards=2)
        for t in range(4):
            rows = pa.table({"k": ["a", "b"], "v": [t, 2 * t]})
            job.advance(t, {"rows": spark.createDataFrame(rows)})
        store.sync()
        job.branch("strict", at=1, replace={"kept": my_job.Above(3)})
        before = job.read("sums").toArrow().sort_by("k")

    def run(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "nosync.cli", *arguments, "--json"]
        env = os.environ | {"PYTHONPATH": str(Path(nosync.__file__).parents[1])}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    before_it = {
        path: path.read_bytes() for name in ("jobs", "branches", "layers") for path in Path("s", name).rglob("*.*")
    }
    plan = here("replay", "s", "strict", "--flow", "my_job:strict", "--dry-run")
    assert (plan["first"], plan["last"], plan["computed"]) == (2, 3, {"kept": 4, "sums": 4})
    after_it = {
        path: path.read_bytes() for name in ("jobs", "branches", "layers") for path in Path("s", name).rglob("*.*")
    }
    assert before_it.keys() & {*Path("s", "jobs").rglob("*.json")}
    assert after_it == before_it, "a job that runs on the branch would be stopped"
    report = run("replay", "s", "strict", "--flow", "my_job:strict")
    assert (report["layers_computed"], report["layers_shared"]) == (8, 4)
    with nosync.open(tmp_path / "s", read_only=True) as read:
        totals = {r["k"]: r["total"] for r in read.read("sums", branch="strict").to_pylist()}
        assert totals == {"a": 1, "b": 2 + 4 + 6}
        mine = {str(e.id.path) for e in read._timelines().manifests()[3].entries if e.id.trace.stage == "sums"}
        newest = next(Path(x.path) for x in read.layers() if any(x.path.endswith(name) for name in mine))
    why = here("explain", "s", "sums", "--key", "k=b", "--as-of", "2", "--flow", "my_job:make")
    assert why["inputs"] == {"rows": [{"k": "b", "v": 2, "_epoch": 1}, {"k": "b", "v": 4, "_epoch": 2}]}
    newest.unlink()
    recovered = here("recover", "s", "--flow", "my_job:make")
    assert (recovered["lost"], recovered["recomputed"]) == (1, 1)
    rewound = here("rewind", "s", "1")
    assert rewound == {"epoch": 1, "was": 3, "kept_as": "before-rewind-2"}
    with nosync.open(tmp_path / "s", read_only=True) as read:
        assert read.last_sealed() == 1
        assert read.read("sums", branch="before-rewind-2").sort_by("k").equals(before)
    asked = here("upgrade", "s", "--flow", "my_job:strict", "--dry-run")
    assert (asked["at"], asked["goes_on"], asked["done"]) == (1, ["kept", "sums"], False)
    assert not here("upgrade", "s", "--flow", "my_job:strict")["done"], "nobody said --yes"
    assert here("upgrade", "s", "--flow", "my_job:strict", "--yes", "--keep-as", "loose")["done"]
    again = here("upgrade", "s", "--flow", "my_job:strict", "--yes")
    assert (again["goes_on"], again["done"]) == ([], False), "the store has that code"
    with nosync.open(tmp_path / "s", read_only=True) as read:
        assert "loose" in read.branches()


FLOW_OF_BARS = """
import nosync

def make(bar=10):
    flow = nosync.Dataflow("f")
    sums = flow.source("rows", "k string, v bigint").aggregate("sums", key=["k"], total=nosync.sum("v"))
    sums.where("high", f"total > {bar}")
    return flow

def lower():
    return make(3)
"""


def test_other_code_than_what_recorded_it_is_refused(
    spark: SparkSession, tmp_path: Path, here: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other_bars.py").write_text(FLOW_OF_BARS)
    import other_bars  # type: ignore[import-not-found]

    with nosync.open(tmp_path / "s") as store:
        job = nosync.Job(other_bars.make(), store, spark=spark, shards=1)
        for t in range(2):
            job.advance(t, {"rows": spark.createDataFrame(pa.table({"k": ["a"], "v": [6]}))})
        job.branch("lower", at=0, replace={"high": "total > 3"})
    for command, why in (
        (["replay", "s", "lower", "--flow", "other_bars:make"], "in stage high, and this flow has the code before"),
        (["explain", "s", "high", "--key", "k=a", "--flow", "other_bars:lower"], "Give the flow that recorded it"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert why in " ".join(capsys.readouterr().err.split())
    assert here("explain", "s", "high", "--key", "k=a", "--flow", "other_bars:make")["value"] == [
        {"k": "a", "total": 12}
    ]
    assert here("replay", "s", "lower", "--flow", "other_bars:lower")["layers_computed"] == 1


@pytest.mark.long
def test_commands_on_a_branch_whose_stages_begin_anew(spark: SparkSession, tmp_path: Path, here: Command) -> None:
    (tmp_path / "bars.py").write_text(FLOW_OF_BARS)
    import bars  # type: ignore[import-not-found]

    with nosync.open(tmp_path / "s") as store:
        job = nosync.Job(bars.make(), store, spark=spark, shards=2)
        for t in range(4):
            job.advance(t, {"rows": spark.createDataFrame(pa.table({"k": ["a", "b"], "v": [t, 3 * t]}))})
        store.sync()
        job.branch("lower", at=1, replace={"high": "total > 3"})

    here("replay", "s", "lower", "--flow", "bars:lower")
    why = here("explain", "s", "high", "--key", "k=a", "--branch", "lower", "--flow", "bars:lower")
    assert why["value"] == [{"k": "a", "total": 6}]
    assert why["inputs"] == {"rows": [{"k": "a", "v": t, "_epoch": t} for t in range(4)]}
    assert why["exact"]
    of_main = here("explain", "s", "high", "--key", "k=a", "--flow", "bars:make")
    assert of_main["value"] == [], "6 is not over 10"
    with nosync.open(tmp_path / "s", read_only=True) as read:
        sealed = read._timelines().manifests("lower")
        theirs = [
            Path("s", "layers", e.id.path) for t in (2, 3) for e in sealed[t].entries if e.id.trace.stage == "high"
        ]
        before = read.read("high", branch="lower").sort_by("k")
    for path in theirs:
        path.unlink()
    report = here("recover", "s", "--branch", "lower", "--flow", "bars:lower")
    assert report["lost"] == report["recomputed"] == len(theirs)
    with nosync.open(tmp_path / "s", read_only=True) as read:
        assert read.read("high", branch="lower").sort_by("k").equals(before)


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ("my_job", "'my_job' is not MODULE:FUNCTION, such as my_job:make_flow"),
        ("no_such_module:make", "cannot import no_such_module"),
        ("json:nothing", "json has no nothing"),
        ("json:dumps", "raised TypeError"),
        ("nosync:Job", "raised TypeError"),
        ("sys:maxsize", "it gives a int, expected a nosync.Dataflow"),
    ],
)
def test_a_wrong_flow(tmp_path: Path, capsys: pytest.CaptureFixture[str], flow: str, message: str) -> None:
    with nosync.open(tmp_path / "s") as store:
        store.append("x", t=0, rows=pa.table({"k": [1]}), key=["k"])
        store.seal(0)
    with pytest.raises(SystemExit) as stop:
        main(["explain", str(tmp_path / "s"), "x", "--key", "k=1", "--flow", flow])
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())
