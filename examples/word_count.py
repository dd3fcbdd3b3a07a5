"""Word count over a stream of text files, with Structured Streaming. Run: python examples/word_count.py

The stream is stopped and started again in the middle: it goes on where it was, from Spark's checkpoint and nosync's layers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import nosync

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "the dog barks and the fox runs",
    "over the hills and far away",
]


def split(rows: pa.Table) -> pa.Table:
    """One row a word."""
    words = pc.utf8_split_whitespace(rows["value"].combine_chunks())
    return pa.table({"word": words.flatten()})


def word_count() -> nosync.Dataflow:
    flow = nosync.Dataflow("word-count")
    lines = flow.source("lines", "value string")
    lines.flat_map("words", split).aggregate("counts", key=["word"], n=nosync.count())
    return flow


def run(spark: SparkSession, directory: Path) -> dict[str, int]:
    text = directory / "text"
    text.mkdir()
    counts: dict[str, int] = {}
    for i, line in enumerate(LINES):
        (text / f"{i}.txt").write_text(line + "\n")
        with nosync.open(directory / "store") as store:  # each time as a new program would
            job = nosync.Job(word_count(), store, spark=spark, shards=2)
            stream = spark.readStream.text(str(text))
            query = job.stream({"lines": stream}, checkpoint=directory / "checkpoint", trigger={"availableNow": True})
            query.awaitTermination()
            counts = {row.word: row.n for row in job.read("counts").collect()}
            print(f"after {i + 1} files: {sum(counts.values())} words, {len(counts)} different ones")
    return counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        for word, n in sorted(run(session, Path(temporary)).items(), key=lambda item: -item[1])[:5]:
            print(f"{n:4} {word}")
