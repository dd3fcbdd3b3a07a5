"""The keyed aggregation of `bench.engines_sums` in Flink SQL. Runs in Flink's own environment, and prints JSON.

`python flink_sums.py '{"rows": ..., "keys": ..., "warm_rows": ..., "checkpoints": DIR, "settings": {...}}'`
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableEnvironment

BASE = {
    "parallelism.default": "2",
    "state.backend.type": "rocksdb",
    "execution.checkpointing.incremental": "true",
    "execution.checkpointing.interval": "1s",
    "taskmanager.memory.process.size": "4g",
    "rest.bind-port": "0",
}
KEY = "MOD(MOD(id * 2654435761, 4294967296), {keys})"


def run(about: dict[str, Any], rows: int) -> float:
    """Seconds from the submission of a bounded job to its end."""
    configuration = Configuration()
    for name, value in {**BASE, "execution.checkpointing.dir": about["checkpoints"], **about["settings"]}.items():
        configuration.set_string(name, value)
    settings = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    env = TableEnvironment.create(settings)
    env.execute_sql(
        "CREATE TEMPORARY TABLE ids (id BIGINT) WITH ('connector' = 'datagen', 'rows-per-second' = '1000000000', "
        f"'fields.id.kind' = 'sequence', 'fields.id.start' = '0', 'fields.id.end' = '{rows - 1}')"
    )
    env.execute_sql(
        "CREATE TEMPORARY TABLE sums (k BIGINT, n BIGINT, total BIGINT, PRIMARY KEY (k) NOT ENFORCED) "
        "WITH ('connector' = 'blackhole')"
    )
    key = KEY.format(keys=about["keys"])
    begun = time.perf_counter()
    env.execute_sql(f"INSERT INTO sums SELECT {key}, COUNT(*), SUM(id) FROM ids GROUP BY {key}").wait()
    return time.perf_counter() - begun


def main() -> None:
    about = json.loads(sys.argv[1])
    run(about, about["warm_rows"])
    short_s = run(about, about["warm_rows"])
    long_s = run(about, about["rows"])
    found = {
        "version": importlib.metadata.version("apache-flink"),
        # A job's start and end take the same time whatever it does between.
        "rows_per_s": (about["rows"] - about["warm_rows"]) / (long_s - short_s),
        "seconds": long_s,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
