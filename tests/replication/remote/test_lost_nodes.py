"""Layers that a node put and never sealed, for it was lost: others did its epoch anew. What manifests list is the store's.

And what a lazily restored directory sees of a writer that goes on in the bucket.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.store.opening import open_store as open_directory
from nosync.replication.remote.bucket_env import BucketEnv
from nosync.replication.remote.bucket_store import connect_bucket
from nosync.replication.remote.restore import restore
from nosync.replication.remote.stub_env import StubEnv
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, epochs, rows_of

BEGUN = 5
"""The epoch that the first node had begun."""


def begin(store: nosync.Store, t: int) -> None:
    store.append("counts", t=t, rows=pa.table({"k": [f"lost{t}"], "n": [t]}), key=["k"])
    store.sync()


def collect(copies: Copies) -> None:
    """Goes on until what was merged is not in the bucket any more."""
    for _ in range(4):
        last = copies.store.last_sealed()
        assert last is not None
        epochs(copies.store, range(last + 1, last + 2), "later")
        copies.push()
        assert copies.level._uploader is not None
        copies.level._uploader.writer.write_index()
        for _ in range(2):
            copies.level._collect_s = float("-inf")
            copies.step()


@pytest.fixture
def bucket() -> SimulatedBucket:
    return SimulatedBucket(Objects())


def after_a_loss(open_store: OpenStore, tmp_path: Path, bucket: SimulatedBucket, *, on_branch: bool) -> Copies:
    """Returns the copies of the node that goes on with epochs of its own."""
    first = open_store("first", settings=QUIET)
    epochs(first, range(2 * BEGUN if on_branch else BEGUN))
    if on_branch:
        first.rewind(BEGUN - 1, keep_as="before")
        first.sync()
    first.close()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first = open_store("first", settings=QUIET)
    copies = Copies(first, bucket, "n1")
    copies.push()
    begin(first, BEGUN)
    copies.push()
    first.close()
    second = open_store("second", settings=QUIET)
    return Copies(second, bucket, "n2", grace_s=0.0)


@pytest.mark.parametrize("on_branch", [False, True])
def test_who_reads_copies_sees_what_was_sealed(
    open_store: OpenStore, tmp_path: Path, bucket: SimulatedBucket, on_branch: bool
) -> None:
    copies = after_a_loss(open_store, tmp_path, bucket, on_branch=on_branch)
    epochs(copies.store, range(BEGUN, BEGUN + 2), "b")
    copies.push()
    with connect_bucket(bucket, None) as found:
        for t in range(BEGUN - 1, BEGUN + 2):
            assert rows_of(found, as_of=t) == rows_of(copies.store, as_of=t)
            assert found.changes("counts", t - 1, t) == copies.store.changes("counts", t - 1, t)


@pytest.mark.parametrize("lazy", [False, True])
def test_what_a_lost_node_began_is_left_out_once_other_layers_cover_it(
    open_store: OpenStore, tmp_path: Path, bucket: SimulatedBucket, lazy: bool
) -> None:
    copies = after_a_loss(open_store, tmp_path, bucket, on_branch=False)
    epochs(copies.store, range(BEGUN, 79), "b")
    copies.store.compact()
    collect(copies)
    last = copies.store.last_sealed()
    assert restore(bucket, tmp_path / "restored", lazy=lazy).epoch == last
    with open_directory(
        tmp_path / "restored", settings=QUIET, env=StubEnv(tmp_path / "restored", bucket) if lazy else None
    ) as found:
        for t in (BEGUN - 1, BEGUN, 60, 78):
            assert rows_of(found, as_of=t) == rows_of(copies.store, as_of=t)


@pytest.mark.parametrize("until", [20, 40])
def test_a_lazy_restore_follows_a_writer_that_merges_further_than_it_goes(
    open_store: OpenStore, tmp_path: Path, bucket: SimulatedBucket, until: int
) -> None:
    """Also where the first node put a layer of one of its epochs that was never sealed."""
    copies = after_a_loss(open_store, tmp_path, bucket, on_branch=False)
    epochs(copies.store, range(BEGUN, 20), "b")
    copies.push()
    lazy = tmp_path / "lazy"
    assert restore(bucket, lazy, lazy=True).epoch == 19
    want = {t: rows_of(copies.store, as_of=t) for t in range(20)}
    epochs(copies.store, range(20, until), "b")
    copies.store.compact()
    copies.store.sync()
    collect(copies)
    with open_directory(lazy, settings=QUIET, env=StubEnv(lazy, bucket)) as found:
        assert found.safe_point() == 19
        assert {t: rows_of(found, as_of=t) for t in want} == want
        assert (found.missing(), found.safe_point()) == ([], 19)
        epochs(found, range(20, 22), "own")
        assert rows_of(found) == want[19] | {"own20": 20, "own21": 21, "all": 21}
        assert {t: rows_of(found, as_of=t) for t in want} == want
        assert found.verify().ok


def test_what_was_fetched_of_layers_that_are_gone_is_let_go(
    open_store: OpenStore, tmp_path: Path, bucket: SimulatedBucket
) -> None:
    copies = Copies(open_store("writer", settings=QUIET), bucket, grace_s=0.0, large_bytes=500)
    epochs(copies.store, range(10))
    copies.push()
    env = BucketEnv(tmp_path / "kept", bucket)
    (tmp_path / "kept" / "tmp").mkdir(parents=True)
    name = next(name for name in env.view.files if name.layer is not None)
    env.map_in_parts(tmp_path / "kept" / name)
    assert len(env._partial) == 1
    copies.store.compact()
    collect(copies)
    env._look()
    assert name not in env.view.files
    assert not env._partial
