"""The driver of a streaming job on a cluster of hosts, as a program of its own: `python -m nosync.testing.driver
settings.json`.

It says what it did, epoch by epoch, in a file of JSON lines; a test or benchmark follows it, and does harm to hosts
meanwhile. With `loop` in the settings the flow has a loop. With `keys` it aggregates that many keys with about 256
bytes of state each, which come in the first epochs, and says how many rows came of it, and of how many keys the sum is
wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import nosync
from nosync.flow.stage import Stage
from nosync.spark.session import session_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHARDS = 4
PAD_BYTES = 224
KEYS_PER_EPOCH, ROWS_PER_EPOCH = 500_000, 20_000


def drop_small(rows: pa.Table) -> pa.Table:
    return rows.filter(pc.greater(rows["n"], 0))


def make_flow(copies: int) -> nosync.Dataflow:
    flow = nosync.Dataflow("words", persist=nosync.replicated(copies) if copies > 1 else "disk")
    kept = flow.source("rows", "word string, n bigint").map("kept", drop_small)
    sums = kept.aggregate("sums", key=["word"], n=nosync.count(), total=nosync.sum("n"))
    sums.aggregate("how_big", key=["n"], words=nosync.count())
    return flow


def rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    made = [(f"{'abcdefgh'[i % 8]}{(i + t) % 13}", (i * 7 + t) % 11 - 2) for i in range(200)]
    return {"rows": spark.createDataFrame(made, "word string, n bigint")}


def make_sums(copies: int) -> nosync.Dataflow:
    flow = nosync.Dataflow("sums", persist=nosync.replicated(copies))
    flow.source("rows", "k bigint, v bigint, pad string").aggregate(
        "sums", key=["k"], n=nosync.count(), total=nosync.sum("v"), pad=nosync.max("pad")
    )
    return flow


def loading_epochs(keys: int) -> int:
    return -(-keys // KEYS_PER_EPOCH)


def keyed_rows(spark: SparkSession, t: int, keys: int) -> dict[str, DataFrame]:
    """Returns all keys in the first epochs, then some rows of any."""
    if t < loading_epochs(keys):
        ids = spark.range(t * KEYS_PER_EPOCH, min(keys, (t + 1) * KEYS_PER_EPOCH), 1, SHARDS)
    else:
        some = spark.range(t * ROWS_PER_EPOCH, (t + 1) * ROWS_PER_EPOCH, 1, SHARDS)
        ids = some.selectExpr(f"pmod(xxhash64(id), {keys}) AS id")
    pad = f"rpad(sha2(CAST(id AS STRING), 512), {PAD_BYTES}, CAST(id AS STRING))"
    return {"rows": ids.selectExpr("id AS k", "id AS v", f"{pad} AS pad")}


LINK, NODE = "node bigint, next bigint, up boolean", "node bigint"
NODES, LINKS_PER_EPOCH = 40, 12


def make_loop(copies: int) -> nosync.Dataflow:
    """Returns what can be reached from node 0 by links that are up."""
    flow = nosync.Dataflow("loop", persist=nosync.replicated(copies) if copies > 1 else "disk")
    roots, log = flow.source("roots", NODE), flow.source("links", LINK)
    state = log.update("links_up", key=["node", "next"], state="one bigint", fn=keep_up)
    links = state.select("edges", "node", "next")

    def follow(reached: Stage) -> Stage:
        return reached.join("hops", links, on=["node"]).select("step", "next AS node")

    roots.iterate("reached", follow).aggregate("how_many", key=["node"], n=nosync.count())
    return flow


def keep_up(changes: pa.Table, state: pa.Table) -> pa.Table:
    """Returns the links that are up after an epoch, in which each changes once."""
    up = changes.filter(changes["up"])
    return up.select(["node", "next"]).append_column("one", pa.array([1] * up.num_rows, pa.int64()))


def link_rows(spark: SparkSession, t: int) -> dict[str, DataFrame]:
    """A piece of a long chain comes, and in every third epoch a link of an earlier one goes."""
    links = [(i % NODES, (i + 1) % NODES, True) for i in range(t * LINKS_PER_EPOCH, (t + 1) * LINKS_PER_EPOCH)]
    if t % 3 == 2:
        links = [(t * 5, t * 5 + 1, False)]
    roots = [(0,)] if t == 0 else []
    return {"roots": spark.createDataFrame(roots, NODE), "links": spark.createDataFrame(links, LINK)}


STAGES = {"sums": ("sums", "how_big"), "loop": ("reached", "how_many")}


def outcome(job: nosync.Job, epochs: int, stages: Sequence[str] = STAGES["sums"]) -> list[list[list[Any]]]:
    return [sorted([*row] for row in job.read(stage, as_of=t).collect()) for stage in stages for t in range(epochs)]


def counted(job: nosync.Job) -> dict[str, int]:
    """Returns of the sums the number of rows, and of keys whose sum is not that of their rows, which have the key as
    their value.
    """
    (row,) = job.read("sums").selectExpr("sum(n) AS rows", "count_if(total <> n * k) AS wrong").collect()
    return {"rows": row.rows, "wrong_keys": row.wrong}


def session(settings: dict[str, Any]) -> SparkSession:
    builder = (
        SparkSession.builder.master(settings["master"])
        .appName("nosync-cluster")
        .config("spark.driver.host", settings["address"])
        .config("spark.driver.bindAddress", settings["address"])
        .config("spark.executor.memory", "512m")
        .config("spark.executor.cores", "1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
    )
    for name, value in session_settings().items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    settings = json.loads(Path(sys.argv[1]).read_text())
    progress = open(settings["progress"], "a", buffering=1)  # noqa: SIM115 - for as long as the program runs

    def say(**what: Any) -> None:
        progress.write(json.dumps(what) + "\n")

    spark = session(settings)
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < settings["executors"] + 1:
        time.sleep(0.1)
    with nosync.open(settings["data"]) as store:
        keys, is_loop = settings.get("keys"), settings.get("loop", False)
        flow = (make_sums if keys else make_loop if is_loop else make_flow)(settings["copies"])
        job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
        last = job.last_sealed()
        report = job.recover() if last is not None else None
        say(started=0 if last is None else last + 1, recovered=report.recomputed if report else 0)
        for t in range(0 if last is None else last + 1, settings["epochs"]):
            began = time.monotonic()
            given = keyed_rows(spark, t, keys) if keys else link_rows(spark, t) if is_loop else rows(spark, t)
            done = job.advance(t, given)
            at_s = time.monotonic()  # of the clock that all processes of a machine share
            say(t=t, seconds=at_s - began, at_s=at_s, computed=done.layers_computed, safe=job.safe_point())
        recovered = [[r.lost - r.fetched, r.recomputed, sorted(r.unrecoverable)] for r in job.recoveries]
        stages = STAGES["loop" if is_loop else "sums"]
        found = counted(job) if keys else outcome(job, settings["epochs"], stages)
        say(outcome=found, recoveries=recovered, safe=job.safe_point())
    progress.close()
    os._exit(0)  # stopping Spark waits two minutes for hosts that are gone


if __name__ == "__main__":
    main()
