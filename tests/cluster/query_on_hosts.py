"""An unchanged stateful query on a Spark cluster, whose checkpoint is behind a door, as a program of its own.

    python query_on_hosts.py MASTER ADDRESS CHECKPOINT INPUT OUTPUT

It counts the words of all files in INPUT, one file a batch, and writes after each batch what all counts are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def main(master: str, address: str, checkpoint: str, source: str, output: str) -> None:
    """Runs until all files are counted."""
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", address)
        .config("spark.driver.bindAddress", address)
        .config("spark.executor.memory", "500m")
        .config("spark.cores.max", "3")
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .config("spark.locality.wait", "0s")  # so partitions move between executors
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.streaming.stateStore.providerClass", PROVIDER)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .config("spark.sql.streaming.stateStore.minDeltasForSnapshot", "2")
        .config("spark.sql.streaming.stateStore.maintenanceInterval", "2s")
        .config("spark.network.timeout", "20s")
        .config("spark.network.timeoutInterval", "5s")
        .config("spark.executor.heartbeatInterval", "2s")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )

    def write(batch: DataFrame, t: int) -> None:
        found = sorted((row["word"], row["count"]) for row in batch.collect())
        hosts = sorted(set(spark.range(0, 6, 1, 6).select(f.lit(1)).rdd.mapPartitions(_host).collect()))
        making = Path(output) / f".{t}"
        making.write_text(json.dumps({"counts": found, "hosts": hosts}))
        making.rename(Path(output) / f"{t}.json")

    words = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1).json(source)
    counts = words.groupBy("word").count()
    query = (
        counts.writeStream.outputMode("complete").foreachBatch(write).option("checkpointLocation", checkpoint).start()
    )
    query.processAllAvailable()
    query.stop()
    spark.stop()


def _host(rows: object) -> list[str]:
    import os

    return [os.environ.get("NOSYNC_DATA", "")]


PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

if __name__ == "__main__":
    main(*sys.argv[1:])
