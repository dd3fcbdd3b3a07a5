"""The keep of a checkpoint: taking in, crashes in between, going on elsewhere, forks, pins and what is let go of."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
from pathlib import Path, PurePosixPath

import google_crc32c
import pytest

import nosync
from nosync.checkpoints.follow import Follower
from nosync.checkpoints.keep import Keep, files_below, open_keep
from nosync.checkpoints.names import Batch
from nosync.checkpoints.restore import fork, next_offsets, restore
from nosync.checkpoints.retention import garbage, garbage_of, set_kept_batches
from nosync.checkpoints.rewind import rewind
from nosync.lsm.errors import InvalidInputError, NotAvailableError, StorageError, StoreLockedError
from nosync.lsm.facts.or_set import add_element
from nosync.lsm.platform.env import Env
from nosync.testing.daemon_cluster import eventually
from tests.checkpoints.fake_query import KINDS, FakeQuery
from tests.helpers.checkpoints import contents
from tests.helpers.killed import Dies, KilledAt


def follow(query: FakeQuery, keep: Keep) -> list[str]:
    return Follower(query.root, keep, list_every_s=0.0).look()


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_can_be_gone_on_from_elsewhere(tmp_path: Path, kind: str) -> None:
    query, keep = FakeQuery(tmp_path / "ck", kind), Keep(tmp_path / "data", "q", Env())
    for _ in range(6):
        query.run()
        follow(query, keep)
    query.begin()
    query.states()  # a batch that does not come to its end
    follow(query, keep)
    assert keep.safe() == 5
    there = contents(query.root)
    for t in range(6):
        made = restore(keep, tmp_path / f"r{t}", t)
        assert made.batch == t
        assert made.repeats_offsets == (t < 6)
        found = contents(made.path)
        assert set(found) >= keep.closures.of(Batch(t)).paths
        assert found == {path: there[path] for path in found}
        assert max(int(p.name) for p in (made.path / "offsets").iterdir()) == t + 1
        assert max(int(p.name) for p in (made.path / "commits").iterdir()) == t
    assert contents(query.root) == there, "the original is never changed"


def test_offsets_whose_log_is_not_kept_are_left_out(tmp_path: Path) -> None:
    """Spark would not start: "batch 3 doesn't exist"."""
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    query.run(2)
    query.begin()
    follow(query, keep)
    assert restore(keep, tmp_path / "whole").repeats_offsets
    keep.remove(["sources/0/2"])
    made = restore(keep, tmp_path / "without")
    assert not made.repeats_offsets
    assert sorted(p.name for p in (made.path / "offsets").iterdir()) == ["0", "1"]


@pytest.mark.parametrize("kind", KINDS)
def test_following_by_name_finds_what_a_listing_finds(tmp_path: Path, kind: str) -> None:
    query, by_name = FakeQuery(tmp_path / "ck", kind), Keep(tmp_path / "a", "q", Env())
    follower = Follower(query.root, by_name, list_every_s=1e9)
    for _ in range(7):
        query.run()
        follower.look()
    listed = Keep(tmp_path / "b", "q", Env())
    follow(query, listed)
    for t in range(7):
        assert by_name.closures.of(Batch(t)) == listed.closures.of(Batch(t)), t


def test_what_spark_removes_stays_kept(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "changelog"), Keep(tmp_path / "data", "q", Env())
    for _ in range(8):
        query.run()
        follow(query, keep)
    for path in list(files_below(query.root, Env())):
        number = path.rpartition("/")[2].partition(".")[0].partition("_")[0]
        if number.isdigit() and int(number) < 6 and "metadata" not in path:
            (query.root / path).unlink()
    again = Keep(tmp_path / "data", "q", Env())
    assert [t for t in range(8) if again.closures.why_not(Batch(t)) is None] == list(range(8))


def test_killed_at_every_step_of_taking_in(tmp_path: Path) -> None:
    """A commit that is kept has all that belongs to it, whenever the process died; and going on takes the rest."""
    query = FakeQuery(tmp_path / "ck", "changelog", partitions=1, snapshot_every=2)
    query.run(2)
    n = 0
    while True:
        data = tmp_path / f"d{n}"
        try:
            keep = Keep(data, "q", KilledAt(n))
            Follower(query.root, keep).look()
            break
        except Dies:
            pass
        found = Keep(data, "q", Env())
        for t in found.index.batches():
            assert found.closures.why_not(t) is None, (n, t)
        Follower(query.root, found).look()
        assert found.safe() == 1
        n += 1
    assert n > 40


def test_killed_at_every_step_of_restoring(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "v2", partitions=1)
    query.run(3)
    keep = Keep(tmp_path / "data", "q", Env())
    follow(query, keep)
    before = contents(keep.root)
    n = 0
    while True:
        keep.env = KilledAt(n)
        try:
            restore(keep, tmp_path / "r")
            break
        except Dies:
            assert not (tmp_path / "r").exists() or set(contents(tmp_path / "r")) >= keep.closures.of(Batch(2)).paths
            if (tmp_path / "r").exists():
                break
        n += 1
    assert n > 10
    assert contents(keep.root) == before


class OtherFileSystem(Env):
    """Where nothing can have a second name."""

    def link(self, source: Path, target: Path) -> None:
        if source.parent.name != "tmp":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super().link(source, target)


def test_a_checkpoint_on_another_file_system_is_copied(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "changelog"), Keep(tmp_path / "data", "q", OtherFileSystem())
    query.run(4)
    follow(query, keep)
    assert keep.safe() == 3
    assert not os.path.samefile(keep.root / "metadata", query.root / "metadata")
    made = restore(keep, tmp_path / "r")
    assert contents(made.path) == {path: (query.root / path).read_bytes() for path in contents(made.path)}


def test_a_fork_has_an_id_of_its_own_and_other_offsets(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    query.write(
        "state/0/_metadata/v2/0",
        'v2\n{"stateStoreInfo":[{"storeName":"default","numPartitions":2,"stateSchemaFilePaths":'
        f'["file:{query.root}/state/0/_stateSchema/default/0_x"]}}]}}',
    )
    query.write("state/0/_stateSchema/default/0_x", "schema")
    query.run(3)
    follow(query, keep)
    made = fork(keep, tmp_path / "f", 1)
    assert not made.repeats_offsets
    assert (
        json.loads((made.path / "metadata").read_text())["id"]
        != json.loads((query.root / "metadata").read_text())["id"]
    )
    assert sorted(p.name for p in (made.path / "offsets").iterdir()) == ["0", "1"]
    text = (made.path / "state/0/_metadata/v2/0").read_text()
    assert f'"file:{made.path}/state/0/_stateSchema/default/0_x"' in text
    assert str(query.root) in (keep.root / "state/0/_metadata/v2/0").read_text(), "the keep stays as it was"
    assert (
        "webhdfs://host/q/state/0"
        in (fork(keep, tmp_path / "g", 1, address="webhdfs://host/q").path / "state/0/_metadata/v2/0").read_text()
    )


def test_mistakes_are_said_where_they_are(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "words", Env())
    with pytest.raises(NotAvailableError, match="no batch can be gone on from yet; none was committed"):
        restore(keep, tmp_path / "r")
    query.run(5)
    follow(query, keep)
    (keep.root / "state/0/0/3.delta").unlink()
    (keep.root / "state/0/0/3.snapshot").unlink()
    keep = open_keep(tmp_path / "data", "words", Env())
    with pytest.raises(
        NotAvailableError, match=r"from batch 2: state/0/0/3 has no file.*nearest that can be gone on from is 1"
    ):
        restore(keep, tmp_path / "r", 2)
    with pytest.raises(NotAvailableError, match=r"from batch 99: batch 99 was not kept.*is 1"):
        restore(keep, tmp_path / "r", 99)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    with pytest.raises(InvalidInputError, match="is there, and not empty"):
        restore(keep, tmp_path / "full", 0)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["x"]
    with pytest.raises(InvalidInputError, match=r"no checkpoint 'word'.*did you mean 'words'"):
        open_keep(tmp_path / "data", "word", Env())
    with pytest.raises(InvalidInputError, match="checkpoint name"):
        Keep(tmp_path / "data", "../x", Env())
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".making")]


def test_links_of_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    (tmp_path / "secret").write_text("secret")
    query.run(1)
    (query.root / "sources/0/7").symlink_to(tmp_path / "secret")
    (query.root / "state/0/_metadata/v2").symlink_to(tmp_path)
    follow(query, keep)
    assert b"secret" not in contents(keep.root).values()
    assert "sources/0/7" not in keep.index


@pytest.mark.parametrize("name", ["state", "state/1", "commits", "offsets", "sources"])
def test_a_directory_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    query.run(2)
    (query.root / name).rename(tmp_path / "moved")
    (query.root / name).symlink_to(tmp_path / "moved")
    with pytest.raises(InvalidInputError, match=f"{name} is a link"):
        follow(query, keep)
    assert keep.safe() is None


def test_what_spark_is_writing_in_place_is_taken_with_what_names_it(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "rocksdb"), Keep(tmp_path / "data", "q", Env())
    query.run(1)
    query.write("state/0/0/SSTs/half.sst", "hal")
    follow(query, keep)
    assert "state/0/0/SSTs/half.sst" not in keep.index
    assert keep.safe() == 0


def test_a_keep_that_is_a_link_is_no_keep(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "hdfs")
    query.run(1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "checkpoints").mkdir(parents=True)
    (tmp_path / "data" / "checkpoints" / "words").symlink_to(tmp_path / "elsewhere")
    assert nosync.checkpoints.api.checkpoints(tmp_path / "data") == []
    with pytest.raises(StorageError, match="symbolic link"):
        nosync.checkpoints.watch(query.root, tmp_path / "data", name="words")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_loses_nothing_and_it_goes_on(tmp_path: Path) -> None:
    class Full(Env):
        is_full = True

        def link(self, source: Path, target: Path) -> None:
            if self.is_full and "commits" in target.parts:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().link(source, target)

    env = Full()
    query, keep = FakeQuery(tmp_path / "ck", "v2"), Keep(tmp_path / "data", "q", env)
    query.run(2)
    with pytest.raises(StorageError, match="No space left"):
        follow(query, keep)
    env.is_full = False
    follow(query, keep)
    assert keep.safe() == 1


def test_what_is_let_go_of_leaves_the_last_batches_and_pins(tmp_path: Path) -> None:
    for seed in range(12):
        chance = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        query = FakeQuery(tmp_path / f"ck{seed}", kind, snapshot_every=chance.randint(2, 5))
        keep = Keep(tmp_path / f"d{seed}", "q", Env())
        for _ in range(chance.randint(5, 14)):
            query.run()
            follow(query, keep)
        last = keep.committed()
        assert last is not None
        pinned = {Batch(chance.randrange(last + 1))}
        held = {*pinned, *(Batch(t) for t in range(max(0, last - 2), last + 1))}
        size = len(keep.index)
        keep.remove(garbage(keep, 3, pinned))
        assert len(keep.index) < size
        query.run()
        follow(query, keep)
        again = Keep(tmp_path / f"d{seed}", "q", Env())
        assert {t for t in again.index.batches() if again.closures.why_not(t) is None} >= held | {Batch(last + 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [1, 3])
def test_what_a_daemon_lets_go_of_while_files_come_is_not_what_comes(tmp_path: Path, kind: str, batches: int) -> None:
    """It looks just after each file got its name, and before the next did, as another process does."""
    data = tmp_path / "data"

    class Watched(Env):
        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            for path in garbage_of(data, Env()):
                self.unlink(data / path)

    (data / "tmp").mkdir(parents=True)
    set_kept_batches(Keep(data, "q", Env()), batches)
    query, keep = FakeQuery(tmp_path / "ck", kind, snapshot_every=2), Keep(data, "q", Watched())
    for t in range(7):
        query.run()
        follow(query, keep)
        there = Keep(data, "q", Env())
        for kept in range(max(0, t + 1 - batches), t + 1):
            assert there.closures.why_not(Batch(kept)) is None
    assert 0 not in there.index.batches()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_peer_lets_go_of_while_it_catches_up_is_not_what_it_needs(tmp_path: Path, kind: str) -> None:
    """It gets what all batches wrote, in any order."""
    for seed in range(4):
        query, data = FakeQuery(tmp_path / f"ck{seed}", kind, snapshot_every=2), tmp_path / f"d{seed}"
        (data / "tmp").mkdir(parents=True)
        set_kept_batches(Keep(data, "q", Env()), 3)
        query.run(7)
        add_element(data, PurePosixPath("checkpoints/q/pins"), "before", {"name": "before", "batch": 1}, Env())
        paths = sorted(files_below(query.root, Env()))
        random.Random(seed).shuffle(paths)
        for path in paths:
            target = data / "checkpoints/q" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(query.root / path)
            for gone in garbage_of(data, Env()):
                (data / gone).unlink()
        there = Keep(data, "q", Env())
        assert [there.closures.why_not(t) for t in (1, *there.index.batches()[-3:])] == [None] * 4  # type: ignore[arg-type]
        assert there.index.batches()[-1] == 6


def test_what_goes_while_a_keep_is_looked_at_is_not_there(tmp_path: Path) -> None:
    class Losing(Env):
        def size_bytes(self, path: Path) -> int:
            if path.name == "2.changelog":
                path.unlink(missing_ok=True)
            return super().size_bytes(path)

    query, keep = FakeQuery(tmp_path / "ck", "changelog"), Keep(tmp_path / "data", "q", Env())
    query.run(5)
    follow(query, keep)
    seen = Keep(tmp_path / "data", "q", Losing())
    assert not [path for path in seen.index.paths() if path.endswith("2.changelog")]
    assert {seen.closures.why_not(Batch(t)) for t in (3, 4)} == {None}, "they go on from a snapshot that is newer"
    before = Keep(tmp_path / "data", "q", Env())
    (before.root / "commits" / "4").unlink()
    assert str(before.closures.why_not(Batch(4))).endswith("commits/4 was removed just now")
    assert before.safe() == 3


@pytest.mark.parametrize("damage", [None, "bit", "size", "text", "algorithm"])
def test_a_file_is_checked_beside_what_spark_wrote(tmp_path: Path, damage: str | None) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    query.run(2)
    path = "state/0/0/2.delta"
    data = (query.root / path).read_bytes()
    crc = google_crc32c.value(data) ^ (damage in ("bit", "algorithm"))
    signed = crc - (1 << 32) if crc >> 31 else crc
    said = {
        "algorithm": "SHA1" if damage == "algorithm" else "CRC32C",
        "value": signed,
        "mainFileSize": len(data) + (damage == "size"),
    }
    query.write(path + ".crc", "x" if damage == "text" else json.dumps(said))
    if damage in (None, "algorithm"):
        follow(query, keep)
        assert keep.safe() == 1
        assert path + ".crc" in keep.closures.of(Batch(1)).paths
    else:
        follower = Follower(query.root, keep)
        with keep.writing():
            follower.look()
        assert "2.delta" in str(follower.damage())
        again = Keep(tmp_path / "data", "q", Env())
        assert again.safe() == 0
        assert path not in again.index


def test_one_process_at_a_time_changes_a_keep(tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "hdfs")
    query.run(8)
    with nosync.checkpoints.watch(query.root, tmp_path / "data", name="q") as running:
        for change in (
            lambda: nosync.checkpoints.watch(query.root, tmp_path / "data", name="q"),
            lambda: nosync.checkpoint("q", tmp_path / "data").clean(),
            lambda: nosync.checkpoint("q", tmp_path / "data").rewind(0, tmp_path / "r", sink_rewound=True),
        ):
            eventually("the batch is there", lambda: running.checkpoint.status(last=0).safe == 7)
            with pytest.raises(StoreLockedError, match="checkpoint q is followed or changed by another process"):
                change()
        assert running.checkpoint.restore(tmp_path / "reading").batch == 7, "who reads needs no lock"
    found = nosync.checkpoint("q", tmp_path / "data")
    assert found.clean(2) > 0
    assert [b.batch for b in found.status().batches if b.why_not is None] == [6, 7]
    assert "LOCK" not in found._keep.index


def test_what_a_killed_process_linked_is_synced_by_the_next(tmp_path: Path) -> None:
    """It may have died between linking and syncing; a power cut later must not leave a commit without its batch."""
    query = FakeQuery(tmp_path / "ck", "changelog", partitions=1, snapshot_every=2)
    query.run(2)
    for n in range(0, 40, 7):
        data = tmp_path / f"d{n}"
        with contextlib.suppress(Dies):
            Follower(query.root, Keep(data, "q", KilledAt(n))).look()
        synced: list[Path] = []

        class Seen(Env):
            def sync_file(self, path: Path, seen: list[Path] = synced) -> None:
                seen.append(path)
                super().sync_file(path)

        keep = Keep(data, "q", Seen())
        with keep.writing():
            Follower(query.root, keep).look()
        assert {keep.root / path for path in keep.index.paths()} <= set(synced), n


def test_a_keep_is_copied_as_files(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "rocksdb"), Keep(tmp_path / "data", "q", Env())
    query.run(6)
    follow(query, keep)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    there, made = contents(query.root), open_keep(tmp_path / "copy", "q", Env())
    found = contents(restore(made, tmp_path / "again", 4).path)
    assert found == {path: there[path] for path in found}


def test_a_rewind_lets_go_of_entries_that_no_batch_before_read(tmp_path: Path) -> None:
    """The query that goes on may put other files into the entries of these numbers, and the keep overwrites nothing."""
    query, keep = FakeQuery(tmp_path / "ck", "changelog"), Keep(tmp_path / "data", "q", Env())
    query.run(6)
    follow(query, keep)
    keep, _ = rewind(keep, 2)
    assert [number for number, _ in sorted(keep.index.source_log("0"))] == [0, 1, 2]
    assert keep.safe() == 2
    query.write("sources/0/3", "v1\nother files")
    keep.take(query.root, ["sources/0/3"])
    assert keep.read("sources/0/3") == b"v1\nother files"


def test_a_data_directory_on_an_object_store_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidInputError, match="s3://bucket/data is not on this host: what is kept of checkpoints"):
        nosync.checkpoint("counts", "s3://bucket/data")


def test_a_batch_that_is_committed_while_all_is_listed_is_taken_by_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit came without its states, and as the commit was known by then, they came ten seconds later, or never."""
    query, keep = FakeQuery(tmp_path / "query", "changelog"), Keep(tmp_path / "data", "q", Env())
    query.run()
    query.run()
    query.begin()
    query.states()
    follower = Follower(query.root, keep, list_every_s=1e9)
    commits = follower._commits

    def committed_after_it_was_asked() -> list[Batch]:
        found = commits()
        query.commit()
        return found

    monkeypatch.setattr(follower, "_commits", committed_after_it_was_asked)
    follower.look()
    monkeypatch.setattr(follower, "_commits", commits)
    assert (keep.committed(), keep.safe()) == (1, 1)
    follower.look()
    assert (keep.committed(), keep.safe()) == (2, 2)


def test_the_offsets_of_a_repartition_are_not_handed_on(tmp_path: Path) -> None:
    """Spark refuses to start a query whose newest offsets are those of a repartition that was not done."""
    query, keep = FakeQuery(tmp_path / "ck", "changelog"), Keep(tmp_path / "data", "q", Env())
    query.run(3)
    conf = {"conf": {"spark.sql.shuffle.partitions": str(query.partitions + 1)}}
    query.begin(f"v1\n{json.dumps(conf)}\n{json.dumps({'logOffset': 2})}")
    follow(query, keep)
    assert next_offsets(keep, Batch(1))
    assert next_offsets(keep, Batch(2)) == set()
    made = restore(keep, tmp_path / "again", 2)
    assert not made.repeats_offsets
    assert max(path.name for path in (tmp_path / "again" / "offsets").iterdir()) == "2"
