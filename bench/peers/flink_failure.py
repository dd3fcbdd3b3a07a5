"""A keyed aggregation on a cluster of Flink that loses a host. Runs on the job manager's host, in Flink's own environment.

Its argument is JSON: `{"rest": HOST, "keys": ..., "pad_bytes": ..., "rows_per_s": ..., "checkpoints": DIR, "settings": {...}}`.
Prints a line of JSON when all keys are in the state and in a checkpoint, and another one when every task runs again after a
failure; their `at_s` are of the clock that all processes of a machine share.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import urllib.request
from typing import Any

from flink_environment import table_environment  # of the directory that this program is in

LOOK_EVERY_S = 0.02
PATIENCE_S = 240.0
ON_THE_WAY = ("RUNNING", "FINISHED")


def submit(about: dict[str, Any]) -> Any:
    """Starts the job, and returns what it gives."""
    env = table_environment(about)
    last = about["keys"] - 1
    for name, options in (
        ("first", f"'rows-per-second' = '1000000000', {_field('sequence', 'start', 'end', last)}"),
        ("more", f"'rows-per-second' = '{about['rows_per_s']}', {_field('random', 'min', 'max', last)}"),
    ):
        env.execute_sql(f"CREATE TEMPORARY TABLE {name} (id BIGINT) WITH ('connector' = 'datagen', {options})")
    env.execute_sql(
        "CREATE TEMPORARY TABLE sums (k BIGINT, n BIGINT, total BIGINT, pad STRING, PRIMARY KEY (k) NOT ENFORCED) "
        "WITH ('connector' = 'blackhole')"
    )
    digest = (
        "SHA512(CAST(id AS STRING))"  # half of it can be compressed in a file of the state, which is Flink's to gain
    )
    pad = f"RPAD({digest}, {about['pad_bytes']}, CAST(id AS STRING))"
    rows = f"SELECT id, {pad} AS pad FROM first UNION ALL SELECT id, {pad} AS pad FROM more"
    return env.execute_sql(f"INSERT INTO sums SELECT id, COUNT(*), SUM(id), MAX(pad) FROM ({rows}) GROUP BY id")


def _field(kind: str, low: str, high: str, last: int) -> str:
    return f"'fields.id.kind' = '{kind}', 'fields.id.{low}' = '0', 'fields.id.{high}' = '{last}'"


class Job:
    """Shows the only job of a cluster, as its REST interface has it."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/jobs"
        self._id = self._get("")["jobs"][0]["id"]

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=10) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def checkpoints(self) -> dict[str, Any]:
        return self._get(f"/{self._id}/checkpoints")

    def is_loaded(self) -> bool:
        """The first rows are all in, and a checkpoint was begun since."""
        vertices = self._get(f"/{self._id}")["vertices"]
        ends = [vertex["end-time"] for vertex in vertices if vertex["status"] == "FINISHED"]
        done = self.checkpoints()["latest"]["completed"]
        return bool(ends) and done is not None and done["trigger_timestamp"] > max(ends)

    def runs_again(self, restored_before: int) -> bool:
        if self.checkpoints()["counts"]["restored"] == restored_before:
            return False
        return self.runs()

    def runs(self) -> bool:
        """Returns whether all tasks have their state, and run."""
        vertices = self._get(f"/{self._id}")["vertices"]
        return bool(vertices) and all(
            sum(vertex["tasks"].get(state, 0) for state in ON_THE_WAY) == vertex["parallelism"] for vertex in vertices
        )


def wait_for(condition: Any) -> float:
    """Waits until it holds, and returns the seconds of the machine's clock then."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if condition():
            return time.monotonic()
        time.sleep(LOOK_EVERY_S)
    raise SystemExit(f"not within {PATIENCE_S} s")


def main() -> None:
    about = json.loads(sys.argv[1])
    submit(about)
    job = Job(f"{about['rest']}:8081")
    loaded_s = wait_for(job.is_loaded)
    counts = job.checkpoints()
    state_bytes = counts["latest"]["completed"]["state_size"]
    version = importlib.metadata.version("apache-flink")
    print(json.dumps({"at_s": loaded_s, "state_bytes": state_bytes, "version": version}), flush=True)
    restored = counts["counts"]["restored"]
    print(json.dumps({"at_s": wait_for(lambda: job.runs_again(restored))}), flush=True)


if __name__ == "__main__":
    main()
