"""The queries of `bench.nexmark` in Flink SQL. Runs in an environment of its own; reads standard input, prints JSON."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flink_environment import table_environment  # of the directory that this program is in
from pyflink.common import RowKind
from pyflink.table import TableEnvironment

RUNS = 5


def environment(about: dict[str, Any], csv: Path) -> TableEnvironment:
    env = table_environment(about)
    for name, columns in about["streams"].items():
        env.execute_sql(
            f"CREATE TEMPORARY TABLE {name} ({columns}) "
            f"WITH ('connector' = 'filesystem', 'path' = '{(csv / name).as_uri()}', 'format' = 'csv')"
        )
    return env


def answer(about: dict[str, Any], query: dict[str, Any]) -> list[list[Any]]:
    """Returns the rows that are left when all changes are applied."""
    counts: dict[tuple[Any, ...], int] = {}
    with environment(about, Path(about["csv"])).execute_sql(query["sql"]).collect() as rows:
        for row in rows:
            added = 1 if row.get_row_kind() in (RowKind.INSERT, RowKind.UPDATE_AFTER) else -1
            counts[tuple(row)] = counts.get(tuple(row), 0) + added
    return [list(row) for row, n in counts.items() for _ in range(n)]


def seconds(about: dict[str, Any], query: dict[str, Any], csv: Path) -> float:
    """Returns the seconds from the submission of a bounded job to its end."""
    env = environment(about, csv)
    env.execute_sql(f"CREATE TEMPORARY TABLE sink ({query['columns']}) WITH ('connector' = 'blackhole')")
    began = time.perf_counter()
    env.execute_sql(f"INSERT INTO sink {query['sql']}").wait()
    return time.perf_counter() - began


def _first_files(about: dict[str, Any], directory: Path, files: int) -> Path:
    """A directory with so many files of each stream."""
    for name in about["streams"]:
        (directory / name).mkdir(parents=True)
        for path in sorted((Path(about["csv"]) / name).iterdir())[:files]:
            (directory / name / path.name).hardlink_to(path)
    return directory


def more_s(about: dict[str, Any], query: dict[str, Any]) -> float:
    """Returns the seconds that a long run takes more than a short one, of the medians of several.

    A job's start and end take the same time whatever it does between.
    """
    few, many = about["files"]
    with tempfile.TemporaryDirectory(dir=Path(about["csv"]).parent) as directory:
        short, long = (_first_files(about, Path(directory) / str(files), files) for files in (few, many))
        seconds(about, query, long)  # the JVM warms up
        short_s, long_s = [seconds(about, query, short)], [seconds(about, query, long)]
        while len(long_s) < RUNS and sum(long_s) < about["enough_s"]:
            short_s.append(seconds(about, query, short))
            long_s.append(seconds(about, query, long))
    return statistics.median(long_s) - statistics.median(short_s)


def main() -> None:
    about = json.load(sys.stdin)
    found: dict[str, Any] = {"version": importlib.metadata.version("apache-flink")}
    if about["answers"]:
        found["answers"] = {query["name"]: answer(about, query) for query in about["queries"]}
    else:
        found["seconds"] = {query["name"]: more_s(about, query) for query in about["queries"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
