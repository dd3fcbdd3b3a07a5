"""Rewinding a keep: a generation of its own, that counts when it is whole. Killed in between, copied in any order."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.follow import Follower
from nosync.checkpoints.generations import generations_of
from nosync.checkpoints.keep import Keep, open_generation, open_keep
from nosync.checkpoints.names import Batch
from nosync.checkpoints.retention import clean, garbage_of, kept_batches, pin, pins, set_kept_batches
from nosync.checkpoints.rewind import rewind
from nosync.lsm.errors import InvalidInputError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import publish_small
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.fake_query import KINDS, FakeQuery
from tests.helpers.checkpoints import contents
from tests.helpers.killed import Dies, KilledAt


def kept(tmp_path: Path, kind: str = "changelog", batches: int = 5) -> tuple[FakeQuery, Path]:
    query = FakeQuery(tmp_path / "ck" / "words", kind)
    for _ in range(batches):
        query.run()
        Follower(query.root, Keep(tmp_path / "data", "words", Env())).look()
    return query, tmp_path / "data"


def continued(root: Path, kind: str) -> FakeQuery:
    """Returns a query that goes on in a restored directory."""
    again = FakeQuery(root, kind)
    again.batch = max(int(p.name) for p in (root / "commits").iterdir())
    for file in [*root.rglob("*_*.changelog"), *root.rglob("*_*.zip")]:
        version, _, id = file.stem.partition("_")
        again.ids[str(file.parent.relative_to(root)), int(version)] = id  # type: ignore[index]
    return again


def test_a_rewind_that_dies_leaves_the_keep_as_it_was_and_can_be_said_again(tmp_path: Path) -> None:
    _, data = kept(tmp_path)
    pin(open_keep(data, "words", Env()), "early", 1)
    pin(open_keep(data, "words", Env()), "late", 4)
    before = contents(data / "checkpoints" / "words")
    n, finished = 0, False
    while not finished:
        copy = tmp_path / f"data{n}"
        shutil.copytree(data, copy)
        keep = open_keep(copy, "words", Env())
        keep.env = KilledAt(n)
        try:
            rewind(keep, 2)
            finished = True
        except Dies:
            pass
        found = open_keep(copy, "words", Env())
        assert contents(copy / "checkpoints" / "words") == before, "nothing of it is changed"
        assert (found.generation, found.safe()) in ((0, 4), (1, 2), (2, 2)), n
        if found.generation == 0:
            assert not finished
            rewind(found, 2)
        found = open_keep(copy, "words", Env())
        assert found.safe() == found.committed() == 2
        assert [p.name for p in pins(found)] == ["early"]
        kept_as = [name for name in nosync.checkpoints.api.checkpoints(copy) if name != "words"]
        assert [open_keep(copy, name, Env()).safe() for name in kept_as] == [4], "what came after is kept, once"
        n += 13
        shutil.rmtree(copy)
    assert n > 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_counts_once_it_is_whole_in_whatever_order_its_files_come(tmp_path: Path, kind: str) -> None:
    _, data = kept(tmp_path, kind)
    rewound, _ = rewind(open_keep(data, "words", Env()), 2)
    made = nosync.checkpoint("words", data).restore(tmp_path / "r")
    again = continued(made.path, kind)
    again.run(2)
    Follower(again.root, rewound).look()
    root = data / "checkpoints"
    for seed in range(20):
        chance, peer = random.Random(seed), tmp_path / f"peer{seed}" / "checkpoints"
        shutil.copytree(root / "words", peer / "words")
        (peer.parent / PLACE_FILE).touch()  # a daemon keeps it
        files = [p for p in (root / "words.1").rglob("*") if p.is_file() and p.name != "LOCK"]
        chance.shuffle(files)
        for file in files:
            target = peer / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
            if chance.random() < 0.15:
                found = open_generation(peer.parent, "words", Env())
                assert (found.generation, found.safe()) in ((0, 4), (1, 2), (1, 3), (1, 4)), seed
        found = open_generation(peer.parent, "words", Env())
        assert (found.generation, found.safe()) == (1, 4)
        # Earlier generations are garbage then, and nothing of this one is.
        gone = garbage_of(peer.parent, Env())
        assert {path.parts[1] for path in gone} == {"words"}
        assert gone.index(next(p for p in gone if p.parts[2] == "commits")) < gone.index(
            next(p for p in gone if p.parts[2] == "state")
        )


def test_a_query_that_was_started_from_an_earlier_batch_goes_on_beside_what_came_after(tmp_path: Path) -> None:
    _, data = kept(tmp_path)
    made = nosync.checkpoint("words", data).restore(tmp_path / "words", 2)
    with nosync.checkpoints.watch(made.path, data) as running:
        continued(made.path, "changelog").run(1)
    assert running.checkpoint.status().safe == 3
    assert nosync.checkpoint("words-before-rewind-1", data).status().safe == 4
    with nosync.checkpoints.watch(made.path, data):
        pass
    assert generations_of(data, "words", Env()) == [0, 1], "that was no other history"


def test_offsets_that_were_decided_anew_are_another_history(tmp_path: Path) -> None:
    query, data = kept(tmp_path, batches=3)
    query.begin()  # the batch after the last commit was decided on, and did not end
    keep = open_keep(data, "words", Env())
    keep.take(query.root, ["sources/0/3.compact", "offsets/3"])
    made = nosync.checkpoint("words", data).restore(tmp_path / "words")
    assert made.repeats_offsets
    (made.path / "offsets/3").unlink()  # as if it had not been kept
    with nosync.checkpoints.watch(made.path, data):
        again = continued(made.path, "changelog")
        again.begin('v1\n{"other": 1}\n{"logOffset": 3}')
        again.states()
        again.commit()
    found = open_keep(data, "words", Env())
    assert (found.generation, found.safe()) == (1, 3)
    assert "other" in (found.root / "offsets/3").read_text()


def test_a_checkpoint_that_went_back_and_ran_on_is_refused(tmp_path: Path) -> None:
    query, data = kept(tmp_path)
    query.write("offsets/4", 'v1\n{"other": 1}\n{"logOffset": 4}')
    with pytest.raises(InvalidInputError, match=r"offsets/4 is not what is kept.*Rewind checkpoint 'words'"):
        nosync.checkpoints.watch(query.root, data)


def test_a_batch_that_read_something_else_than_was_kept_of_it_is_refused(tmp_path: Path) -> None:
    """Two queries, or one that was set back while it is followed."""
    query, data = kept(tmp_path, batches=3)
    query.begin()
    keep = open_keep(data, "words", Env())
    keep.take(query.root, ["sources/0/3.compact", "offsets/3"])
    query.write("offsets/3", 'v1\n{"other": 1}\n{"logOffset": 3}')
    query.states()
    query.commit()
    with pytest.raises(nosync.CorruptionError, match=r"offsets/3: is not what is kept of this batch"):
        Follower(query.root, keep).look()
    assert "commits/3" not in open_keep(data, "words", Env()).index


def test_a_name_that_other_contents_have_is_refused(tmp_path: Path) -> None:
    query, data = kept(tmp_path, batches=2)
    keep = Keep(data, "words", Env())
    target = keep.root / "state/0/0/9.changelog"
    target.write_text("of another query")
    query.write("state/0/0/9.changelog", "of this one")
    with pytest.raises(nosync.CorruptionError, match="has other contents than"):
        keep.take(query.root, ["state/0/0/9.changelog"])
    assert target.read_text() == "of another query"


def test_a_rewind_is_not_undone_by_watching_the_directory_from_before(tmp_path: Path) -> None:
    query, data = kept(tmp_path)
    rewound, name = rewind(open_keep(data, "words", Env()), 2)
    with pytest.raises(
        InvalidInputError, match=f"before it was rewound to batch 2; what came after is kept as '{name}'"
    ):
        nosync.checkpoints.watch(query.root, data, name="words")
    again = nosync.checkpoint("words", data).restore(tmp_path / "again")
    query = continued(again.path, "changelog")
    query.run()
    with nosync.checkpoints.watch(query.root, data, name="words") as watching:
        eventually("the batch is kept", lambda: watching.checkpoint.status().committed == 3)
        assert watching.problem is None
    assert open_keep(data, "words", Env()).generation == rewound.generation


def test_how_many_batches_are_kept_is_remembered(tmp_path: Path) -> None:
    _, data = kept(tmp_path)
    keep = open_keep(data, "words", Env())
    assert kept_batches(keep) == 100
    set_kept_batches(keep, 2)
    assert kept_batches(open_keep(data, "words", Env())) == 2
    set_kept_batches(keep, 300)
    assert kept_batches(keep) == 300
    rewound, later = rewind(keep, Batch(3))
    assert kept_batches(rewound) == 300
    assert kept_batches(open_keep(data, later, Env())) == 300
    assert nosync.checkpoint("words", data).clean(2) > 0
    assert generations_of(data, "words", Env()) == [0, 1]
    assert not [p for p in (data / "checkpoints" / "words").rglob("*") if p.is_file() and p.name != "LOCK"]


@pytest.mark.parametrize("fields", [{}, {"at": "x"}, {"at": None}])
def test_a_mark_that_says_nothing_makes_no_generation_count(tmp_path: Path, fields: dict[str, object]) -> None:
    _, data = kept(tmp_path)
    rewound, _ = rewind(open_keep(data, "words", Env()), 2)
    (rewound.root / "rewound.json").unlink()
    publish_small(data, rewound.root / "rewound.json", fields, Env())
    with pytest.raises(nosync.CorruptionError, match=r"rewound\.json"):
        open_keep(data, "words", Env())
    (data / PLACE_FILE).touch()  # then it may come from a peer
    assert open_keep(data, "words", Env()).safe() == 4


@pytest.mark.parametrize("gone", ["commits/2", "offsets/2"])
def test_a_rewound_generation_that_is_not_whole_is_not_passed_over(tmp_path: Path, gone: str) -> None:
    _, data = kept(tmp_path)
    rewound, _ = rewind(open_keep(data, "words", Env()), 2)
    (rewound.root / gone).unlink()
    with pytest.raises(nosync.CorruptionError, match="was rewound to batch 2, and files of it are gone"):
        nosync.checkpoint("words", data)


def test_a_batch_that_ran_again_with_the_same_offsets_is_another_history(tmp_path: Path) -> None:
    query, data = kept(tmp_path, batches=4)
    made = nosync.checkpoint("words", data).restore(tmp_path / "words", 2)
    again = continued(made.path, "changelog")
    (made.path / "offsets/3").unlink(missing_ok=True)
    again.begin((query.root / "offsets/3").read_text())
    again.write("state/0/0/4.changelog", "of mended code")
    again.commit()
    with pytest.raises(InvalidInputError, match=r"state/0/0/4\.changelog is not what is kept of batch 3.*Rewind"):
        nosync.checkpoints.watch(made.path, data)


def test_another_query_in_the_directory_is_not_mixed_in(tmp_path: Path) -> None:
    query, data = kept(tmp_path)
    running = nosync.checkpoints.watch(query.root, data, name="words")
    try:
        shutil.rmtree(query.root)
        other = FakeQuery(query.root, "changelog")
        other.write("metadata", '{"id": "5d1d2b1f-0000-4000-8000-000000000000"}')
        other.run(7)
        eventually("it is found", lambda: "is of query 5d1d2b1f" in str(running.problem))
    finally:
        running.abandon()
    assert nosync.checkpoint("words", data).status().committed == 4


def test_a_query_that_goes_back_while_it_is_followed_is_not_mixed_in(tmp_path: Path) -> None:
    query, data = kept(tmp_path)
    running = nosync.checkpoints.watch(query.root, data, name="words")
    try:
        shutil.rmtree(query.root)
        nosync.checkpoint("words", data).restore(query.root, 2)
        continued(query.root, "changelog").run(1)
        eventually("it is found", lambda: "it went back" in str(running.problem))
    finally:
        running.abandon()
    with nosync.checkpoints.watch(query.root, data, name="words"):
        pass
    assert nosync.checkpoint("words", data).status().safe == 3


def test_a_checkpoint_that_was_not_followed_for_long_is_followed_again(tmp_path: Path) -> None:
    """Spark removed the newest batch that is kept: there is a gap."""
    query, data = kept(tmp_path)
    query.run(10)
    for t in range(10):
        query.remove(f"offsets/{t}")
        query.remove(f"commits/{t}")
    with nosync.checkpoints.watch(query.root, data, name="words") as running:
        eventually("all is kept", lambda: running.checkpoint.status().safe == 14)
        assert running.problem is None


def test_what_was_removed_from_the_keep_does_not_come_again(tmp_path: Path) -> None:
    query, data = kept(tmp_path, batches=30)
    keep = open_keep(data, "words", Env())
    with keep.writing():
        follower = Follower(query.root, keep, list_every_s=0.0)
        set_kept_batches(keep, 3)
        assert clean(keep)
        batches = keep.index.batches()
        assert {path.partition("/")[0] for path in follower.look()} <= {"state"}
        assert follower.look() == []
        assert keep.index.batches() == batches
        query.run(1)
        follower.look()
        assert keep.safe() == 30


def test_who_opened_a_checkpoint_before_it_was_rewound_changes_what_counts(tmp_path: Path) -> None:
    _, data = kept(tmp_path)
    early = nosync.checkpoint("words", data)
    made, _ = nosync.checkpoint("words", data).rewind(2, tmp_path / "rewound", sink_rewound=True)
    with nosync.checkpoints.watch(made.path, data, name="words"):
        with pytest.raises(nosync.StoreLockedError):
            early.clean(1)
        with pytest.raises(nosync.StoreLockedError):
            early.rewind(1, tmp_path / "again", sink_rewound=True)
    assert early.restore(tmp_path / "restored").batch == 2
    early.pin("here")
    assert [one.name for one in nosync.checkpoint("words", data).pins()] == ["here"]
