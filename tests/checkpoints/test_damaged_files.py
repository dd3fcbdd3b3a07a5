"""Files of a checkpoint that are damaged: they are left out and told of, and what does not need them is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.follow import Follower
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import Batch
from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.platform.env import Env
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.fake_query import FakeQuery
from tests.checkpoints.test_commands import run


def left_out(query: FakeQuery, data: Path) -> tuple[Keep, str | None]:
    """Follows the checkpoint as far as it is, and returns what is kept and what is told."""
    keep = Keep(data, "q", Env())
    follower = Follower(query.root, keep)
    with keep.writing():
        follower.look()
    return keep, follower.damage()


@pytest.mark.parametrize(
    ("kind", "path", "needed_by"),
    [
        ("changelog", "state/0/0/3.zip", set()),
        ("rocksdb", "state/0/0/3.zip", {2}),
        ("changelog", "state/0/0/4.changelog", {3, 4}),
        ("hdfs", "state/0/0/3.snapshot", set()),
        ("hdfs", "state/1/1/left-keyToNumValues/5.delta", {4}),
        ("rocksdb", "offsets/3", {3, 4}),
        ("v2", "commits/4", {4}),
    ],
)
@pytest.mark.parametrize("how", ["empty", "torn"])
def test_a_damaged_file_is_left_out_and_the_rest_is_kept(
    tmp_path: Path, kind: str, path: str, needed_by: set[int], how: str
) -> None:
    query = FakeQuery(tmp_path / "ck", kind)
    query.run(8)
    whole = query.root / path
    whole.write_bytes(b"" if how == "empty" else whole.read_bytes()[:7])
    keep, told = left_out(query, tmp_path / "data")
    assert keep.safe() == 7
    if how == "empty" or path.endswith(".zip"):
        assert told is not None
        assert path in told
        assert told.endswith("That is left out, with each batch that needs it; the others are kept")
        kept = keep.index.batches()
        assert {t for t in range(8) if t not in kept or keep.closures.why_not(Batch(t))} == needed_by


def test_what_is_damaged_is_told_while_a_query_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = FakeQuery(tmp_path / "ck", "changelog")
    query.run(4)
    (query.root / "state/0/0/3.zip").write_bytes(b"PK")
    running = nosync.checkpoints.watch(query.root, tmp_path / "data", name="q")
    eventually("it is told", lambda: running.problem is not None and "3.zip" in running.problem)
    query.run(3)
    eventually("later batches are kept", lambda: running.checkpoint.status().newest == 6)
    assert running.problem is not None
    with pytest.raises(CorruptionError, match=r"3\.zip.*left out"):
        running.close()
    code, _, told = run(
        capsys, "checkpoint", "watch", query.root, "--name", "q", "--once", "--store", tmp_path / "data"
    )
    assert code == 1
    assert "3.zip" in told
    assert nosync.checkpoint("q", tmp_path / "data").status().newest == 6


@pytest.mark.parametrize("said", ["", "{", "[]", '{"name": "x"}'])
def test_a_query_without_its_id_cannot_be_gone_on(
    tmp_path: Path, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark does not start there."""
    query = FakeQuery(tmp_path / "ck", "hdfs")
    query.run(3)
    (query.root / "metadata").write_text(said)
    keep, _ = left_out(query, tmp_path / "data")
    assert keep.safe() is None
    assert "metadata" in str(keep.closures.why_not(Batch(2)))
    code, _, told = run(
        capsys, "checkpoint", "watch", query.root, "--name", "q", "--once", "--store", tmp_path / "data"
    )
    assert code == 1
    assert "metadata" in told


def test_the_offsets_before_are_read(tmp_path: Path) -> None:
    """Spark reads those of the batch before when it starts."""
    query = FakeQuery(tmp_path / "ck", "hdfs")
    query.run(6)
    (query.root / "offsets/4").write_text("no offsets")
    keep, _ = left_out(query, tmp_path / "data")
    assert [t for t in keep.index.batches() if keep.closures.why_not(t)] == [4, 5]
    assert keep.safe() == 3


def test_a_store_that_is_removed_meanwhile_is_told_of(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "changelog")
    query.run(4)
    running = nosync.checkpoints.watch(query.root, tmp_path / "data", name="q")
    eventually("all is kept", lambda: running.checkpoint.status().newest == 3)
    shutil.rmtree(tmp_path / "data")
    query.run(2)
    eventually("it is told", lambda: running.problem is not None and "is gone" in running.problem)
    with pytest.raises(StorageError, match="what was kept of checkpoint q is gone.*watch the checkpoint again"):
        running.close()
    with nosync.checkpoints.watch(query.root, tmp_path / "data", name="q"):
        pass
    assert nosync.checkpoint("q", tmp_path / "data").status().newest == 5
