"""Running the ordinary queries in processes of their own, with inputs of a file for each batch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.checkpoints import ordinary_queries

# Spark's transformWithState, "processor" here, needs its RocksDB store; Spark refuses the query with the other.
NAMES = {
    form: tuple(
        name
        for name in ("aggregate", "join", "dedupe", "processor", "arbitrary")
        if form != "hdfs" or name != "processor"
    )
    for form in ordinary_queries.FORMATS
}
FILES = 8
PATIENCE_S = 240.0


def make_source(root: Path) -> Path:
    """Fills a directory with two inputs, of a file for each batch, and returns it."""
    chance = random.Random(5)
    for side in "ab":
        (root / side).mkdir()
        for i in range(FILES):
            rows = []
            for _ in range(60):
                ms = i * 7000 + chance.randrange(9000)
                at = f"2026-01-01T00:{ms // 60000:02}:{ms % 60000 // 1000:02}.{ms % 1000:03}Z"
                rows.append(json.dumps({"k": f"k{chance.randrange(20)}", "n": chance.randrange(100), "ts": at}))
            (root / side / f"{i:03}.json").write_text("\n".join(rows))
            os.utime(root / side / f"{i:03}.json", (1.7e9 + i, 1.7e9 + i))
    return root


def start(
    checkpoints: Path | str, output: Path, source: Path, form: str, variant: str = "", names: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts the queries of some names, by default all that the form has."""
    what = [checkpoints, output, source, form, ",".join(names or NAMES[form]), variant]
    command = [sys.executable, ordinary_queries.__file__, *map(str, what)]
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen[bytes], output: Path) -> None:
    assert process.wait(timeout=PATIENCE_S) == 0, (output / "log").read_text()[-3000:]


def outputs(output: Path, names: Sequence[str]) -> dict[str, dict[int, list[str]]]:
    return {name: {int(p.stem): json.loads(p.read_text()) for p in (output / name).glob("*.json")} for name in names}
