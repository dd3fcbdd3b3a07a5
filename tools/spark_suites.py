"""Runs Spark's own streaming tests with all checkpoints behind the door, and as they are, and compares.

    python tools/spark_suites.py SPARK [SUITE ...] [--only TEXT ...] [--most-s SECONDS]

SPARK is a copy of Spark's sources, of about the version that is installed: its tests are not in the wheel. Nothing of it is
copied. SUITE is a module below pyspark.sql.tests, such as streaming.test_streaming (default: a list, which takes two hours, for
those of transformWithState are long). `--only`: tests whose names have one of these texts. `--most-s`: a suite that takes
longer is ended, and counts as failed. The exit code is 1 where a test fails behind the door that passes without it, but for
those that list their checkpoint on disk.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

SUITES = (
    "streaming.test_streaming",
    "streaming.test_streaming_foreach_batch",
    "pandas.test_pandas_grouped_map_with_state",
    "pandas.streaming.test_pandas_transform_with_state",
    "pandas.streaming.test_pandas_transform_with_state_checkpoint_v2",
    "pandas.streaming.test_pandas_transform_with_state_state_variable",
    "pandas.streaming.test_pandas_transform_with_state_state_variable_checkpoint_v2",
    "pandas.streaming.test_transform_with_state",
    "pandas.streaming.test_transform_with_state_checkpoint_v2",
    "pandas.streaming.test_transform_with_state_state_variable",
    "pandas.streaming.test_transform_with_state_state_variable_checkpoint_v2",
)
LOCAL = frozenset({"test_stream_save_options", "test_stream_save_options_overwrite"})
"""They list the checkpoint as a directory on this host, where it is not when it is behind the door."""
CHECKPOINT = "checkpointLocation"


def main() -> int:
    """Runs all suites both ways, each in a process of its own. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spark", type=Path, help="a copy of Spark's sources")
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument(
        "--way", choices=("plain", "door"), help="run in this process, one way (the tool does so itself)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="run tests whose names have one of these")
    parser.add_argument("--most-s", type=float, default=3600.0, metavar="SECONDS", help="for a suite, one way")
    given = parser.parse_args()
    tests = given.spark / "python" / "pyspark" / "sql" / "tests"
    if not tests.is_dir():
        parser.error(f"{given.spark} is no copy of Spark's sources: {tests} is not there")
    if given.way:
        print(json.dumps(run(given.spark, given.suites, given.way, given.only)))
        return 0
    is_worse = False
    for suite in given.suites or SUITES:
        found = {}
        for way in ("plain", "door"):
            began_s = time.monotonic()
            command = [sys.executable, __file__, str(given.spark.absolute()), suite, "--way", way]
            command += ["--only", *given.only] if given.only else []
            try:
                ran = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
                    timeout=given.most_s,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                print(f"{suite} {way}: not within {given.most_s:g} s", flush=True)
                is_worse = True
                continue
            if ran.returncode:
                print(f"{suite} {way}: ended with {ran.returncode}", flush=True)
                is_worse = True
                continue
            found[way] = json.loads(ran.stdout.strip().splitlines()[-1])
            said = {name: value for name, value in found[way].items() if name != "failed"}
            failed = sorted(found[way]["failed"])
            print(f"{suite} {way}: {said}, failed {failed}, {time.monotonic() - began_s:.0f} s", flush=True)
        worse = sorted({*found.get("door", {}).get("failed", ())} - {*found.get("plain", {}).get("failed", ())})
        worse = [name for name in worse if name.rpartition(".")[2] not in LOCAL]
        if worse:
            is_worse = True
            print(f"{suite}: these fail behind the door alone: {', '.join(worse)}", flush=True)
    return int(is_worse)


def run(spark: Path, suites: list[str], way: str, only: list[str]) -> dict[str, Any]:
    """Runs suites in this process. Returns how many tests ran, were skipped and failed, and the checkpoints they had."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_TESTING"] = "1"
    import pyspark.sql  # noqa: PLC0415 - after its environment is set
    from pyspark.testing import sqlutils, utils  # noqa: PLC0415

    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    pyspark.sql.__path__.append(str(spark / "python" / "pyspark" / "sql"))
    os.chdir(spark)  # tests read files by paths relative to it
    for name in set(dir(utils)) - set(dir(sqlutils)):  # where helpers moved between versions
        setattr(sqlutils, name, getattr(utils, name))
    loader, suite = unittest.defaultTestLoader, unittest.TestSuite()
    loader.testNamePatterns = [f"*{text}*" for text in only] or None
    for name in suites:
        suite.addTests(loader.loadTestsFromModule(importlib.import_module(f"pyspark.sql.tests.{name}")))
    with tempfile.TemporaryDirectory() as data:
        if way == "plain":
            return _outcome(suite, {})
        from nosync.checkpoints import serve  # noqa: PLC0415

        with serve(data) as door:
            names: dict[str, str] = {}
            _send_behind(door, names)
            return _outcome(suite, names)


def _outcome(suite: unittest.TestSuite, checkpoints: dict[str, Any]) -> dict[str, Any]:
    result = unittest.TextTestRunner(verbosity=0, stream=sys.stderr).run(suite)
    failed = [test.id().rpartition(".tests.")[2] for test, _ in [*result.failures, *result.errors]]
    return {
        "run": result.testsRun, "skipped": len(result.skipped), "behind the door": len(checkpoints), "failed": failed,
    }  # fmt: skip


def _send_behind(door: Any, names: dict[str, str]) -> None:
    """Lets each query have its checkpoint behind a door, where states are read, too.

    `names`: gets the name of each checkpoint, by its path.
    """
    from pyspark.sql.readwriter import DataFrameReader  # noqa: PLC0415
    from pyspark.sql.streaming.readwriter import DataStreamWriter  # noqa: PLC0415

    read_option, load = DataFrameReader.option, DataFrameReader.load
    option, start = DataStreamWriter.option, DataStreamWriter.start

    def behind(path: str) -> str:
        names[path] = "t" + hashlib.sha256(path.encode()).hexdigest()[:32]
        return str(door.address(names[path]))

    def with_option(self: Any, key: str, value: Any) -> Any:
        if key.lower() == CHECKPOINT.lower() and str(value).startswith("/"):
            self.has_checkpoint, value = True, behind(str(value))
        return option(self, key, value)

    def with_options(self: Any, **options: Any) -> Any:
        for key, value in options.items():
            self = with_option(self, key, value)
        return self

    def started(self: Any, *arguments: Any, **options: Any) -> Any:
        for key in [key for key in options if key.lower() == CHECKPOINT.lower()]:
            with_option(self, key, options.pop(key))
        if not getattr(self, "has_checkpoint", False):
            option(self, CHECKPOINT, behind(f"none given {len(names)}"))
        return start(self, *arguments, **options)

    def with_read_option(self: Any, key: str, value: Any) -> Any:
        return read_option(self, key, door.address(names[value]) if key == "path" and value in names else value)

    def loaded(self: Any, path: Any = None, *arguments: Any, **options: Any) -> Any:
        behind_door = isinstance(path, str) and path in names  # what reads states is given the checkpoint's path
        return load(self, door.address(names[path]) if behind_door else path, *arguments, **options)

    DataFrameReader.option, DataFrameReader.load = with_read_option, loaded
    DataStreamWriter.option, DataStreamWriter.options, DataStreamWriter.start = with_option, with_options, started


if __name__ == "__main__":
    sys.exit(main())
