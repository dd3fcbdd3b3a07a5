"""A job whose newest manifest is lost: nothing older is read in its place, and the epoch is run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import nosync
from tests.conftest import OpenStore

pytestmark = pytest.mark.spark

SETTINGS = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0, merge=False)


def job_of(store: nosync.Store, spark: SparkSession) -> nosync.Job:
    flow = nosync.Dataflow("words")
    flow.source("words", "word string").aggregate("counts", key=["word"], n=nosync.count())
    return nosync.Job(flow, store, spark=spark, shards=1)


def counts(job: nosync.Job) -> dict[str, int]:
    return {row.word: row.n for row in job.read("counts").collect()}


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", [(2,), (0, 1, 2)])
def test_the_newest_epochs_of_a_job(open_store: OpenStore, spark: SparkSession, lost: tuple[int, ...]) -> None:
    inputs = {t: {"words": spark.createDataFrame([("a",), (f"w{t}",)], "word string")} for t in range(4)}
    store = open_store(settings=SETTINGS)
    job = job_of(store, spark)
    for t in range(3):
        job.advance(t, inputs[t])
    store.sync()
    expected = counts(job)
    store.close()
    root = Path(store.directory.root)
    for t in lost:
        (root / f"manifests/main/{t}.json").unlink()
    source = spark.read.format("nosync").option("stage", "counts")
    with pytest.raises(Exception, match="sealed up to epoch 2"):
        source.load(str(root)).collect()
    store = open_store(settings=SETTINGS)
    job = job_of(store, spark)
    with pytest.raises(nosync.LostEpochError, match=rf"advance\({lost[0]}\)"):
        job.read("counts")
    with pytest.raises(nosync.LostEpochError):
        job.read("counts", 2)
    with pytest.raises(nosync.OutOfOrderError, match=f"(next one|next timestamp of branch main) is {lost[0]}"):
        job.advance(3, inputs[3])
    for t in lost:
        job.advance(t, inputs[t])
    assert counts(job) == expected == {"a": 3, "w0": 1, "w1": 1, "w2": 1}
    store.sync()
    assert store.verify().ok
    store.close()
