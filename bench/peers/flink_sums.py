"""The keyed aggregation of `bench.engines_sums` in Flink SQL. Runs in Flink's own environment; reads and prints JSON.

`{"rows": ..., "keys": ..., "warm_rows": ..., "checkpoints": DIR, "settings": {...}}`
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

from flink_environment import spent, table_environment  # of the directory that this program is in

KEY = "MOD(MOD(id * 2654435761, 4294967296), {keys})"


def run(about: dict[str, Any], rows: int) -> float:
    """Seconds from the submission of a bounded job to its end."""
    env = table_environment(about)
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
    about = json.load(sys.stdin)
    run(about, about["warm_rows"])
    at = [spent()]
    short_s = run(about, about["warm_rows"])
    at.append(spent())
    long_s = run(about, about["rows"])
    at.append(spent())
    (cpu_0, bytes_0), (cpu_1, bytes_1), (cpu_2, bytes_2) = at
    found = {
        "version": importlib.metadata.version("apache-flink"),
        # A job's start and end take the same whatever it does between.
        "rows": about["rows"] - about["warm_rows"],
        "seconds": long_s - short_s,
        "cpu_s": (cpu_2 - cpu_1) - (cpu_1 - cpu_0),
        "written_bytes": (bytes_2 - bytes_1) - (bytes_1 - bytes_0),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
