"""Checkpoints of which the bucket has another history under the same name: of one checkpoint, one history is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import nosync
from nosync.checkpoints.names import Batch
from nosync.lsm.platform.env import Env
from nosync.replication.remote.checkpoint_copies import ChangedFiles
from nosync.replication.remote.restore import restore
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.checkpoints.fake_query import FakeQuery
from tests.checkpoints.test_generations import continued
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, epochs


def run_otherwise(query: FakeQuery, batches: int) -> None:
    """Runs batches that read other rows, and at another time: offsets and states say so."""
    for _ in range(batches):
        conf = {"batchTimestampMs": 7, "conf": {"spark.sql.shuffle.partitions": str(query.partitions)}}
        query.begin(f"v1\n{json.dumps(conf)}\n{json.dumps({'logOffset': query.batch + 1})}")
        query.states()
        for path in (query.root / "state").rglob(f"{query.batch + 1}.delta"):
            path.write_text(f"others: {path.read_text()}")
        query.commit()


def keep(query: FakeQuery, store: nosync.Store) -> None:
    with nosync.checkpoints.watch(query.root, store=store.directory.root, name="words"):
        pass
    store.sync()


def assert_restored(
    bucket: SimulatedBucket, target: Path, query: FakeQuery, newest: int, before: FakeQuery | None = None
) -> None:
    """What is restored goes on as the query would, whose directory is the oracle, from every batch that can be gone on from.

    `before`: the query that it was restored from, whose earlier files it does not have.
    """
    roots = [one.root for one in (query, before) if one is not None]
    restore(bucket, target)
    found = nosync.checkpoint("words", store=target)
    assert (found.status().newest, found.status().safe) == (newest, newest)
    assert found.query() == json.loads((query.root / "metadata").read_text())["id"]
    for batch in [one.batch for one in found.status().batches if one.why_not is None]:
        made = found.restore(target.with_name(f"{target.name}-from-{batch}"), at=Batch(batch)).path
        files = [
            path.relative_to(made) for path in made.rglob("*") if path.is_file() and not path.name.endswith(".crc")
        ]
        assert len(files) > 5
        for path in files:
            oracle = next(root / path for root in roots if (root / path).exists())
            assert (made / path).read_bytes() == oracle.read_bytes(), (batch, path)


def test_a_query_that_goes_on_from_a_peer_is_not_mixed_with_what_the_lost_node_put(
    open_store: OpenStore, tmp_path: Path
) -> None:
    bucket, first = SimulatedBucket(Objects()), open_store("first", settings=QUIET)
    epochs(first, range(1))
    query = FakeQuery(tmp_path / "ck" / "a", "hdfs", snapshot_every=100)
    query.run(3)
    keep(query, first)
    first.close()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first = open_store("first", settings=QUIET)
    query.run(2)  # goes into the bucket, and to no peer
    keep(query, first)
    Copies(first, bucket, "n1").push()
    first.close()

    second = open_store("second", settings=QUIET)
    copies = Copies(second, bucket, "n2")
    copies.push()
    nosync.checkpoint("words", store=second.directory.root).restore(tmp_path / "ck" / "b")
    again = continued(tmp_path / "ck" / "b", "hdfs")
    again.snapshot_every = 100
    run_otherwise(again, 1)
    keep(again, second)
    copies.push()
    assert_restored(bucket, tmp_path / "old", query, 4)  # which had come further, and is whole
    run_otherwise(again, 2)
    keep(again, second)
    copies.push()
    assert_restored(bucket, tmp_path / "new", again, 5, query)
    copies = Copies(second, bucket, "n2")  # a start later
    run_otherwise(again, 1)
    keep(again, second)
    copies.push()
    assert_restored(bucket, tmp_path / "newer", again, 6, query)


def test_another_query_under_the_name_takes_the_place_of_the_one_before(open_store: OpenStore, tmp_path: Path) -> None:
    bucket, store = SimulatedBucket(Objects()), open_store("store", settings=QUIET)
    epochs(store, range(1))
    query = FakeQuery(tmp_path / "ck" / "a", "hdfs")
    query.run(3)
    keep(query, store)
    copies = Copies(store, bucket)
    copies.push()
    shutil.rmtree(store.directory.root / "checkpoints" / "words")
    other = FakeQuery(tmp_path / "ck" / "b", "hdfs")
    other.write("metadata", json.dumps({"id": "bbbbbbbb-0000-4000-8000-000000000000"}))
    run_otherwise(other, 5)
    keep(other, store)
    copies.push()
    assert_restored(bucket, tmp_path / "restored", other, 4)


@pytest.mark.parametrize("kind", ["hdfs", "rocksdb"])
def test_nodes_that_keep_the_same_put_each_file_once(open_store: OpenStore, tmp_path: Path, kind: str) -> None:
    bucket, first = SimulatedBucket(Objects()), open_store("first", settings=QUIET)
    epochs(first, range(1))
    query = FakeQuery(tmp_path / "ck" / "a", kind)
    query.run(4)
    keep(query, first)
    copies = Copies(first, bucket, "n1")
    copies.push()
    shutil.copytree(tmp_path / "first", tmp_path / "second", ignore=shutil.ignore_patterns("LOCK"))
    second = Copies(open_store("second", settings=QUIET), bucket, "n2")
    second.push()
    query.run(1)
    keep(query, first)
    copies.push()
    shutil.copytree(first.directory.root / "checkpoints", tmp_path / "second" / "checkpoints", dirs_exist_ok=True)
    assert second.level._uploader is not None
    assert second.level._uploader._others is not None
    second.level._uploader._others.look()
    second.push()
    assert "checkpoints/words/commits/4" not in second.level._uploader.writer.contents.places
    assert_restored(bucket, tmp_path / "restored", query, 4)


def test_directories_that_did_not_change_are_not_listed_again(tmp_path: Path) -> None:
    env = Ticking()
    query = FakeQuery(tmp_path / "checkpoints" / "words", "hdfs")
    query.run(2)
    changed = ChangedFiles(tmp_path, env)
    everything = set(changed.since_last())
    assert everything == {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(changed.since_last()) == everything, "more may have come within the same tick of the clock"
    env.now_s += 10
    assert set(changed.since_last()) == everything
    env.listed.clear()
    assert list(changed.since_last()) == []
    assert env.listed == []
    query.run(1)
    found = set(changed.since_last())
    assert {Path("checkpoints/words/commits/2"), Path("checkpoints/words/offsets/2")} <= {Path(path) for path in found}
    assert Path("checkpoints/words/metadata") not in {Path(path) for path in found}
    (tmp_path / "checkpoints" / "later").mkdir()
    (tmp_path / "checkpoints" / "later" / "metadata").write_text("{}")
    assert Path("checkpoints/later/metadata") in {Path(path) for path in changed.since_last()}


class Ticking(Env):
    """Its clock is set, and it says what was listed."""

    def __init__(self) -> None:
        self.now_s, self.listed = 0.0, list[Path]()

    def monotonic_s(self) -> float:
        return self.now_s

    def entries(self, path: Path) -> list[tuple[str, bool]]:
        self.listed.append(path)
        return super().entries(path)
