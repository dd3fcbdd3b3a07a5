"""Batches that ran again, by other code or after a rewind: what is kept stays that of one history."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.follow import Follower
from nosync.checkpoints.keep import Keep, open_keep
from nosync.checkpoints.names import Batch
from nosync.checkpoints.rewind import going_on, rewind
from nosync.lsm.errors import CorruptionError, InvalidInputError
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import KINDS, FakeQuery
from tests.checkpoints.test_generations import continued, kept
from tests.checkpoints.test_keep import OtherFileSystem
from tests.helpers.checkpoints import contents


def with_other_code(root: Path, kind: str) -> FakeQuery:
    query = continued(root, kind)
    query.code = "x10"
    return query


@pytest.mark.parametrize("env", [Env, OtherFileSystem])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_was_set_back_while_it_is_followed_is_not_mixed_in(
    tmp_path: Path, kind: str, seen: bool, env: type[Env]
) -> None:
    query, keep = FakeQuery(tmp_path / "ck" / "words", kind), Keep(tmp_path / "data", "words", env())
    with keep.writing():
        follower = Follower(query.root, keep)
        query.run(5)
        follower.look()
        query.root.rename(tmp_path / "before")
        nosync.checkpoint("words", tmp_path / "data").restore(query.root, 3)
        before = contents(keep.root)
        if seen:
            with pytest.raises(CorruptionError, match="it went back"):
                follower.look()
        with_other_code(query.root, kind).run(3)
        for _ in range(2):
            with pytest.raises(CorruptionError, match="it went back" if seen else "the query went back, and ran again"):
                follower.look()
        assert contents(keep.root) == before


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_ran_a_batch_again_with_other_code_is_refused(tmp_path: Path, kind: str, batches: int) -> None:
    _, data = kept(tmp_path, kind)
    made = nosync.checkpoint("words", data).restore(tmp_path / "again", 3)
    with_other_code(made.path, kind).run(batches)
    with pytest.raises(InvalidInputError, match="is not what is kept of batch 4.*ran again"):
        nosync.checkpoints.watch(made.path, data, name="words")


def test_a_rewind_is_not_undone_where_files_are_copied(tmp_path: Path) -> None:
    query, env = FakeQuery(tmp_path / "ck" / "words", "changelog"), OtherFileSystem()
    keep = Keep(tmp_path / "data", "words", env)
    query.run(5)
    with keep.writing():
        Follower(query.root, keep).look()
    rewound, name = rewind(keep, 2)
    with pytest.raises(InvalidInputError, match=f"what came after is kept as '{name}'"):
        going_on(query.root, rewound)
    made = nosync.checkpoint("words", tmp_path / "data").restore(tmp_path / "again")
    continued(made.path, "changelog").run(2)  # the same code, and the same offsets
    assert going_on(made.path, rewound) is rewound


def test_a_fork_has_nothing_of_a_later_start(tmp_path: Path) -> None:
    query, data = kept(tmp_path, batches=3)
    query.write("state/0/_metadata/v2/3", (query.root / "state/0/_metadata/metadata").read_bytes())
    query.write("state/0/_stateSchema/default/3_x", "v3 of another schema")
    query.run(2)
    with nosync.checkpoints.watch(query.root, data, name="words"):
        pass
    later = {"state/0/_metadata/v2/3", "state/0/_stateSchema/default/3_x"}
    for at, has_later in ((2, False), (3, True)):
        made = nosync.checkpoint("words", data).fork(tmp_path / f"fork{at}", at)
        assert bool(later & contents(made.path).keys()) == has_later


@pytest.mark.parametrize("batches", [0, -1, True])
def test_no_batches_are_nothing_to_keep(tmp_path: Path, batches: int) -> None:
    query, data = kept(tmp_path)
    with pytest.raises(InvalidInputError, match="batches cannot be kept, expected a whole number from 1 on"):
        nosync.checkpoints.watch(query.root, data, name="words", keep_batches=batches)
    with pytest.raises(InvalidInputError, match="batches cannot be kept, expected a whole number from 1 on"):
        nosync.checkpoint("words", data).clean(batches)
    with nosync.checkpoints.watch(query.root, data, name="words", keep_batches=3):
        pass
    assert nosync.checkpoint("words", data).clean() > 0


def test_what_is_kept_is_apart_from_the_checkpoint(tmp_path: Path) -> None:
    query, data = kept(tmp_path)
    for inside in (query.root, query.root / "keep"):
        with pytest.raises(InvalidInputError, match="is in the checkpoint"):
            nosync.checkpoints.watch(query.root, inside, name="words")
    with pytest.raises(InvalidInputError, match="is among the kept checkpoints"):
        nosync.checkpoints.watch(data / "checkpoints" / "words", data, name="again")
    with pytest.raises(InvalidInputError, match="is in the checkpoint .*: say a directory elsewhere"):
        nosync.checkpoint("words", data).restore(query.root / "sub")
    odd = shutil.copytree(query.root, tmp_path / "Words 1")
    with pytest.raises(InvalidInputError, match="no name is said .*--name.*'words 1' is not a valid name"):
        nosync.checkpoints.watch(odd, data)


def test_an_output_that_has_no_log_does_not_say_what_a_sink_has(tmp_path: Path) -> None:
    _, data = kept(tmp_path)
    log = tmp_path / "data out" / "words" / "_spark_metadata"
    log.mkdir(parents=True)
    (log / "4").write_text("v1")
    for output, says in (
        (log.parent, "has batches up to 4"),
        (log.parent.parent, "Give the very path that the query writes to"),
    ):
        with pytest.raises(nosync.NosyncError, match=says):
            nosync.checkpoint("words", data).rewind(2, tmp_path / "again", output=output)
    assert open_keep(data, "words", Env()).safe() == Batch(4)
    with pytest.raises(
        nosync.StorageError, match=r"is rewound, though.*nosync checkpoint restore words DIRECTORY --at 2"
    ):
        nosync.checkpoint("words", data).rewind(2, "/proc/nosync/x", sink_rewound=True)
    assert open_keep(data, "words", Env()).safe() == Batch(2)
