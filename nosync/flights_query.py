"""An ordinary Structured Streaming query over a year of flights, as anybody writes it: nosync is not imported here.

    python flights_query.py CHECKPOINT SOURCE OUTPUT [BAD_HOURS]

It reads a file a batch, counts flights and adds up their delays by airport and airline, and ends with the last file. Each
batch writes all rows to a file of its own in OUTPUT, which it replaces when it runs again. BAD_HOURS is a JSON file with
hours whose flights do not count.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "origin string, carrier string, hour long, dep_delay double, day date"


def main(checkpoint: str, source: str, output: str, bad_hours: str = "") -> None:
    """Runs the query until no file is left."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", "2")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    flights = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(source)
    flown = flights.where("dep_delay is not null")
    if bad_hours:
        hours = json.loads(Path(bad_hours).read_text())
        flown = flown.where(~F.concat_ws(" ", "origin", F.col("day").cast("string"), "hour").isin(hours))
    delays = flown.groupBy("origin", "carrier").agg(F.count("*").alias("n"), F.sum("dep_delay").alias("total"))

    def write(rows: DataFrame, batch: int) -> None:
        made = Path(output, f".{batch}")
        made.write_text(json.dumps([row.asDict() for row in rows.collect()]))
        os.replace(made, Path(output, f"{batch}.json"))

    query = (
        delays.writeStream.outputMode("complete")
        .foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
