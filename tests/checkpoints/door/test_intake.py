"""Taking what was published into the keep: in its order, and of a batch when it is committed."""

from __future__ import annotations

import json
from pathlib import Path

import google_crc32c
import pytest

from nosync.checkpoints.door.intake import Intake
from nosync.checkpoints.keep import Keep
from nosync.checkpoints.names import Batch
from nosync.checkpoints.retention import set_kept_batches
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import KINDS, FakeQuery
from tests.helpers.checkpoints import contents


class Publishing(FakeQuery):
    """Says what it writes to an intake, as the door does."""

    intake: Intake | None = None

    def write(self, path: str, data: str | bytes) -> None:
        super().write(path, data)
        if self.intake is not None:
            self.intake.published(path)


def opened(tmp_path: Path, kind: str = "changelog", keep_batches: int = 100) -> tuple[Publishing, Keep, Intake]:
    query, keep = Publishing(tmp_path / "ck", kind), Keep(tmp_path / "data", "q", Env())
    query.intake = intake = Intake(query.root, keep, keep_batches, lambda: None)
    intake.take_all()
    return query, keep, intake


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_was_published_is_kept_and_every_batch_can_be_gone_on_from(tmp_path: Path, kind: str) -> None:
    query, keep, intake = opened(tmp_path, kind)
    for t in range(8):
        query.run()
        if t % 3:  # now and then several batches at once
            intake.step(0.0)
            assert keep.safe() == t
    intake.step(0.0)
    assert [keep.closures.why_not(Batch(t)) for t in range(8)] == [None] * 8
    there = contents(query.root)
    assert {path for path in there if not path.startswith("sources/")} <= contents(keep.root).keys()


def test_states_wait_for_the_commit_of_their_batch(tmp_path: Path) -> None:
    """A batch that runs again may write them otherwise."""
    query, keep, intake = opened(tmp_path)
    query.run(2)
    query.begin()
    query.write("state/0/0/3.changelog", "of an attempt that died")
    intake.step(0.0)
    assert "offsets/2" in keep.index
    assert "sources/0/2" in keep.index
    assert "state/0/0/3.changelog" not in keep.index
    query.states()
    query.commit()
    intake.step(0.0)
    assert keep.read("state/0/0/3.changelog") == b"state/0/0 3"
    assert keep.safe() == 2


def test_the_checksum_of_a_commit_is_no_commit(tmp_path: Path) -> None:
    """Spark renames the two in any order."""
    query, keep, intake = opened(tmp_path)
    query.run()
    query.begin()
    query.states()
    query.write("commits/1.crc", json.dumps({"algorithm": "none", "value": 0, "mainFileSize": 30}))
    intake.step(0.0)
    assert "state/0/0/2.changelog" not in keep.index
    query.commit()
    intake.step(0.0)
    assert keep.safe() == 1
    assert "commits/1.crc" in keep.closures.of(Batch(1)).paths


def test_a_snapshot_after_its_commit_comes_without_another(tmp_path: Path) -> None:
    query, keep, intake = opened(tmp_path)
    query.run(2)
    intake.step(0.0)
    query.snapshot("state/0/0", 2, "")
    intake.step(0.0)
    assert "state/0/0/2.zip" in keep.index
    query.snapshot("state/0/0", 5, "")
    intake.step(0.0)
    assert "state/0/0/5.zip" not in keep.index, "its batch is not committed"


def test_what_an_earlier_process_published_is_taken_first(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "v2")
    query.run(4)
    query.begin()
    query.states()
    keep = Keep(tmp_path / "data", "q", Env())
    Intake(query.root, keep, 100, lambda: None).take_all()
    assert keep.safe() == 3
    assert "offsets/4" in keep.index
    assert not [path for path in keep.index.paths() if "/5_" in path]


def test_a_file_that_does_not_fit_its_checksum_is_told_and_nothing_later_is_safe(tmp_path: Path) -> None:
    query, keep, intake = opened(tmp_path)
    query.run()
    intake.step(0.0)
    query.begin()
    query.states()
    good = b"state/0/0 2"
    value = int.from_bytes(google_crc32c.value(good).to_bytes(4, "big"), "big")
    said = {"algorithm": "CRC32C", "value": value, "mainFileSize": len(good)}
    query.write("state/0/0/2.changelog.crc", json.dumps(said))
    query.write("state/0/0/2.changelog", b"state/0/0 X")
    query.commit()
    query.run()
    intake.step(0.0)
    assert intake.problem is not None
    assert "does not match the checksum" in intake.problem
    assert keep.safe() == 0
    assert intake.copies(["offsets/0", "commits/0"]) == 1
    assert intake.copies(["offsets/2", "commits/1"]) == 0
    (query.root / "state/0/0/2.changelog").write_bytes(good)
    intake.step(0.0)
    assert intake.problem is None
    assert keep.safe() == 2


def test_a_damaged_file_that_was_there_before_is_a_problem(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "changelog")
    query.run()
    query.write("state/0/0/1.changelog.crc", json.dumps({"algorithm": "CRC32C", "value": 1, "mainFileSize": 1}))
    intake = Intake(query.root, Keep(tmp_path / "data", "q", Env()), 100, lambda: None)
    intake.take_all()
    assert "its checksum is of 1" in str(intake.problem)


@pytest.mark.parametrize("path", ["metadata", "offsets/2", "commits/1", "sources/0/2"])
def test_a_name_that_gets_other_contents_is_told_and_nothing_later_is_kept(tmp_path: Path, path: str) -> None:
    """Somebody removes offsets so that the batch is planned anew, or a whole checkpoint for another query."""
    query, keep, intake = opened(tmp_path)
    query.run(2)
    query.begin()
    intake.step(0.0)
    assert (intake.problem, intake.copies([path])) == (None, 1)
    kept = keep.read(path)
    query.remove(path)
    query.write(path, "v1\n{}\nof somebody else")
    assert intake.copies([path]) == 0, "strict mode does not take the one before for it"
    query.states()
    query.commit()
    intake.step(0.0)
    assert intake.problem is not None
    assert f"{query.root / path}: has other contents than" in intake.problem
    assert (keep.safe(), keep.read(path), intake.copies([path])) == (1, kept, 0)
    query.remove(path)
    query.write(path, kept)
    intake.step(0.0)
    assert (intake.problem, keep.safe(), intake.copies([path])) == (None, 2, 1)


def test_empty_files_are_not_kept(tmp_path: Path) -> None:
    """What was written just before the power was lost."""
    query, keep, intake = opened(tmp_path, "hdfs")
    query.run(2)
    intake.step(0.0)
    query.begin()
    query.states()
    (query.root / "state/0/1/3.delta").write_bytes(b"")
    query.commit()
    intake.step(0.0)
    assert intake.problem is not None
    assert "state/0/1/3.delta: is empty" in intake.problem
    assert keep.safe() == 1


def test_old_batches_go(tmp_path: Path) -> None:
    query, keep, intake = opened(tmp_path, keep_batches=3)
    set_kept_batches(keep, 3)
    for _ in range(12):
        query.run()
        intake.step(0.0)
    assert len(keep.index.batches()) <= 7
    assert keep.safe() == 11
    assert keep.closures.why_not(Batch(9)) is None
