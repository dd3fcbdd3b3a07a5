"""The keyed aggregation of `bench.engines_sums` in Flink SQL. Runs in Flink's own environment; reads and prints JSON.

`{"rows": ..., "keys": ..., "first_rows": ..., "warm_rows": ..., "pairs": ..., "checkpoints": DIR, "settings": {...}}`
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from typing import Any

from flink_environment import spent, table_environment  # of the directory that this program is in

_DRAWN = "MOD(MOD(id * 2654435761, 4294967296) * (MOD(id, 65521) + 1), 4294967291)"
KEY = "CASE WHEN id < {keys} THEN id ELSE MOD(" + _DRAWN + ", {keys}) END"


def run(about: dict[str, Any], rows: int) -> float:
    """Returns the seconds from the submission of a bounded job to its end."""
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
    run(about, about["first_rows"])
    # A job's start and end, and the first rows, take the same whatever comes after them.
    pairs = [_difference(about) for _ in range(about["pairs"])]
    found = {
        "version": importlib.metadata.version("apache-flink"),
        "seconds": [seconds for seconds, _, _ in pairs],
        "cpu_s": sum(cpu_s for _, cpu_s, _ in pairs),
        "written_bytes": sum(written for _, _, written in pairs),
    }
    print(json.dumps(found))


def _difference(about: dict[str, Any]) -> tuple[float, float, int]:
    """Returns the seconds, processor seconds and bytes written that a long job takes more than a short one."""
    at = [spent()]
    short_s = run(about, about["warm_rows"])
    at.append(spent())
    long_s = run(about, about["rows"])
    at.append(spent())
    (cpu_0, bytes_0), (cpu_1, bytes_1), (cpu_2, bytes_2) = at
    return long_s - short_s, (cpu_2 - cpu_1) - (cpu_1 - cpu_0), (bytes_2 - bytes_1) - (bytes_1 - bytes_0)


if __name__ == "__main__":
    main()
