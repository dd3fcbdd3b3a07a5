"""Two ordinary queries whose code was wrong are taken back to an earlier batch. Run: python examples/rewound_sinks.py

One writes to a table that remembers batches by the query's id, as Delta does with txnAppId and txnVersion: the table is taken
back first, then the query is rewound. The other one writes Parquet files, whose log of batches Spark keeps: it is forked,
with an output of its own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import nosync
from nosync.checkpoints import checkpoint, watch
from nosync.checkpoints.rewind import SinkRemembersError

LINES = ["the quick fox", "the lazy dog", "THE fox and the dog", "The End"]
GOOD_UNTIL = 1
"""The last batch that is right: upper-case words come after it, and were taken for other words."""


class Table:
    """A table with a log like Delta's: an entry adds the rows of a batch, and says which batch of which query that was."""

    def __init__(self, directory: Path, app: str) -> None:
        self.log, self.app = directory / "_delta_log", app
        self.log.mkdir(parents=True, exist_ok=True)

    def write(self, rows: DataFrame, batch: int) -> None:
        """Appends the rows of a batch, unless the log has it: then it ran before."""
        if batch > max((version for version, _ in self.entries()), default=-1):
            said = {"txn": {"appId": self.app, "version": batch}}
            added = {"add": {row["word"]: row["n"] for row in rows.collect()}}
            (self.log / f"{batch:020}.json").write_text(f"{json.dumps(said)}\n{json.dumps(added)}\n")

    def entries(self) -> list[tuple[int, dict[str, int]]]:
        found = [path.read_text().splitlines() for path in sorted(self.log.glob("*.json"))]
        return [(json.loads(txn)["txn"]["version"], json.loads(add)["add"]) for txn, add in found]

    def restore(self, batch: int) -> None:
        """Takes the table back to how it was after a batch: RESTORE TABLE ... TO VERSION AS OF, in Delta."""
        for path in self.log.glob("*.json"):
            if int(path.stem) > batch:
                path.unlink()

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _, rows in self.entries():
            found |= rows
        return found


def words(spark: SparkSession, lines: Path, to_lower: bool) -> DataFrame:
    text = spark.readStream.option("maxFilesPerTrigger", 1).text(str(lines))
    return text.selectExpr(f"explode(split({'lower(value)' if to_lower else 'value'}, ' ')) AS word")


def count_words(rows: DataFrame, checkpoint_location: Path, write: Callable[[DataFrame, int], None]) -> None:
    counts = rows.groupBy("word").count().withColumnRenamed("count", "n")
    writer = counts.writeStream.outputMode("update").foreachBatch(write)
    writer.option("checkpointLocation", str(checkpoint_location)).trigger(availableNow=True).start().awaitTermination()


def write_known_words(rows: DataFrame, checkpoint_location: Path, output: Path) -> None:
    writer = rows.dropDuplicates(["word"]).writeStream.format("parquet").option("path", str(output))
    writer.option("checkpointLocation", str(checkpoint_location)).trigger(availableNow=True).start().awaitTermination()


def run(spark: SparkSession, directory: Path) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Returns the counts before and after the query was rewound, and all words in the output of the other one's fork."""
    data, lines = directory / "nosync", directory / "lines"
    lines.mkdir(parents=True)
    for i, line in enumerate(LINES):
        (lines / f"{i}.txt").write_text(line + "\n")
        os.utime(lines / f"{i}.txt", (1.7e9 + i, 1.7e9 + i))  # Spark reads the oldest file first
    table, parquet = Table(directory / "table", "counts"), directory / "parquet"
    with watch(directory / "ck-counts", data, name="counts"), watch(directory / "ck-known", data, name="known"):
        count_words(words(spark, lines, to_lower=False), directory / "ck-counts", table.write)
        write_known_words(words(spark, lines, to_lower=False), directory / "ck-known", parquet)
    wrong = table.counts()

    # The table remembers batches, so a query that ran them again would write nothing: rewinding is refused.
    query = checkpoint("counts", data)
    table.app = query.query() or ""
    _sign(table)
    try:
        query.rewind(GOOD_UNTIL, directory / "ck-rewound", output=directory / "table")
    except SinkRemembersError as error:
        print(f"refused: {error}")
    table.restore(GOOD_UNTIL)
    made, kept_as = query.rewind(GOOD_UNTIL, directory / "ck-rewound", output=directory / "table")
    print(f"the table is taken back, the query goes on after batch {made.batch}; the rest is kept as {kept_as}")
    count_words(words(spark, lines, to_lower=True), made.path, table.write)

    # A file sink cannot be taken back, so the other query is forked: a query of its own, with an output of its own. That
    # begins with what the first one had written until then, as links.
    lower = directory / "parquet-lower"
    forked = checkpoint("known", data).fork(
        directory / "ck-fork", GOOD_UNTIL, name="known-lower", output=parquet, new_output=lower
    )
    write_known_words(words(spark, lines, to_lower=True), forked.path, lower)
    written = spark.read.parquet(str(lower)).collect()
    return wrong, table.counts(), sorted(row["word"] for row in written)


def _sign(table: Table) -> None:
    """Lets the entries of the table's log be those of the query's id, which was not known before it ran."""
    for path in table.log.glob("*.json"):
        txn, add = path.read_text().splitlines()
        said = json.loads(txn)
        said["txn"]["appId"] = table.app
        path.write_text(f"{json.dumps(said)}\n{add}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        builder = SparkSession.builder.master("local[2]").config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        session = nosync.configure_spark(builder).getOrCreate()
        before, after, known = run(session, Path(temporary))
        print(f"wrong: {before}\nright: {after}\nknown words: {known}")
