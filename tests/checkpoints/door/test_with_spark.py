"""Queries that write through the door, on Spark: killed with the door, their live directories wiped, started again.

The oracle is the output of each batch in a run without faults.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.door.api import address_of
from nosync.checkpoints.spark_files import read_offsets
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints import ordinary_queries
from tests.checkpoints.spark_runs import FILES, NAMES, PATIENCE_S, finish, make_source, outputs, start

pytestmark = pytest.mark.spark

IS_LONG = bool(os.environ.get("NOSYNC_LONG"))
FORMS = tuple(ordinary_queries.FORMATS) if IS_LONG else ("v2",)


def open_door(data: Path, mode: str) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a door in a process of its own, and returns the address of its checkpoints."""
    (data / "checkpoint-live" / ".address").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "nosync.cli",
        "checkpoint",
        "serve",
        "--store",
        str(data),
        "--listen",
        "127.0.0.1:0",
    ]
    with open(data.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen([*command, *(["--strict"] if mode == "strict" else [])], stdout=log, stderr=log)
    eventually("the door is open", (data / "checkpoint-live" / ".address").is_file, 60.0)
    return process, address_of("x", data).rpartition("/")[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory, source: Path, form: str) -> dict[str, dict[int, list[str]]]:
    """Returns the outputs of a run without faults and without a door."""
    root = tmp_path_factory.mktemp("free")
    finish(start(root / "ck", root / "out", source, form, names=names_of(form)), root / "out")
    return outputs(root / "out", names_of(form))


def names_of(form: str) -> tuple[str, ...]:
    return NAMES[form] if IS_LONG else ("aggregate", "processor")


@pytest.mark.long("make checkpoints")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "dies", ["driver, door and directories", "driver", "door"] if IS_LONG else ["driver, door and directories"]
)
@pytest.mark.parametrize("mode", [pytest.param("async", marks=pytest.mark.long("make checkpoints")), "strict"])
def test_queries_go_on(
    tmp_path: Path, source: Path, free: dict[str, dict[int, list[str]]], form: str, mode: str, dies: str
) -> None:
    names, data, out = names_of(form), tmp_path / "data", tmp_path / "out"
    data.mkdir()
    door, root = open_door(data, mode)
    try:
        driver = start(root, out, source, form, names=names)
        eventually(
            "every query has three outputs",
            lambda: all(len(list((out / name).glob("*.json"))) >= 3 for name in names),
            PATIENCE_S,
        )
        if dies == "door":
            door.kill()
            assert driver.wait(timeout=PATIENCE_S) != 0, "a query does not go on without the door"
        else:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        if dies != "driver":
            door.kill()
            door.wait()
        offsets = {name: offsets_to_repeat(data, name) for name in names}
        if dies != "driver":
            begun = {name: max(map(int, os.listdir(data / "checkpoint-live" / name / "offsets"))) for name in names}
            if dies != "door":
                for name in names:
                    shutil.rmtree(data / "checkpoint-live" / name)
            for name in names if mode == "strict" else ():  # a batch begins only when the one before is safe
                assert (nosync.checkpoint(name, data).status(last=0).safe or 0) >= max(begun[name] - 2, 0)
            door, root = open_door(data, mode)
        if dies in ("driver", "door"):
            for name in names:
                remove_unread_entries(data / "checkpoint-live" / name)
        finish(start(root, out, source, form, names=names), out)
    finally:
        door.terminate()
        assert door.wait(timeout=60) in (0, -signal.SIGKILL)
    assert outputs(out, names) == free
    assert all(len(batches) >= FILES for batches in free.values())
    for name in names:
        assert nosync.checkpoint(name, data).status(last=0).safe == max(free[name])
        kept = data / "checkpoints" / name / "offsets"
        assert {batch: (kept / batch).read_bytes() for batch in offsets[name]} == offsets[name]


def offsets_to_repeat(data: Path, name: str) -> dict[str, bytes]:
    """Returns the kept offsets up to those of the batch after the safe one: a batch reads what it read before."""
    safe = nosync.checkpoint(name, data).status(last=0).safe
    kept = {path.name: path.read_bytes() for path in (data / "checkpoints" / name / "offsets").iterdir()}
    return {batch: text for batch, text in kept.items() if int(batch) <= (-1 if safe is None else safe) + 1}


def remove_unread_entries(live: Path) -> None:
    """Removes the entries of sources' logs that no offsets name.

    A driver that dies between the two leaves such. Spark, with a plain checkpoint as well, puts what they say into one
    batch with what the next entry says, and batches would not compare.
    """
    newest = max((live / "offsets").iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1)
    for source, end in read_offsets(newest.read_bytes(), str(newest)).log_ends.items():
        for entry in (live / "sources" / str(source)).iterdir():
            if entry.name.isdigit() and int(entry.name) > end:
                entry.unlink()
