"""Inputs are released at the safe point and not before, for good, and nothing else notices."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId, parse_path
from nosync.lsm.model.timestamp import Time, epoch_of
from nosync.lsm.node.node import Node
from nosync.lsm.store.backup import backup
from nosync.lsm.store.direct import raw_fingerprint
from nosync.testing import FaultyEnv
from tests.conftest import OpenStore

STAGES = ("rows", "sums")


def run(store: nosync.Store, t: int, policy: str = "drop") -> None:
    """An epoch of a source and of what is computed from it."""
    store.append("rows", t=t, rows=pa.table({"v": [t, t]}), key=[])
    store.append("sums", t=t, rows=pa.table({"k": [1, 2], "v": [t, -t]}), key=["k"])
    fingerprint = raw_fingerprint(node_of(store).timelines.timeline("main"))
    ids = [LayerId(TraceId(stage, fingerprint, Shard(0)), Description.of_epoch(t)) for stage in STAGES]
    meta = {"at_safe_point": {"rows": policy}} if policy != "keep" else {}
    store.node.seal(t, ids, meta=meta)


def node_of(store: nosync.Store) -> Node:
    assert isinstance(store.node, Node)
    return store.node


def files(store: nosync.Store, stage: str) -> list[str]:
    node_of(store).collect_garbage()
    return sorted(path.name for path in (store.directory.root / "layers" / stage).rglob("*.layer"))


def manual(open_store: OpenStore, env: FaultyEnv | None = None) -> nosync.Store:
    settings = nosync.StoreSettings(background=False, grace_s=0.0)
    return open_store(settings=settings, env=env) if env else open_store(settings=settings)


def test_inputs_go_when_they_are_safe_and_nothing_misses_them(open_store: OpenStore) -> None:
    store = manual(open_store)
    for t in range(4):
        run(store, t)
    node_of(store).release_inputs()
    assert len(files(store, "rows")) == 4, "nothing is safe yet"
    store.sync()
    node_of(store).release_inputs()
    assert files(store, "rows") == []
    assert len(files(store, "sums")) == 4
    for _ in range(2):
        assert store.safe_point() == 3
        assert store.missing() == []
        assert store.verify().ok
        assert store.read("sums", 2).num_rows == 2
        read_only = nosync.open(store.directory.root, read_only=True)
        assert (read_only.status().missing, read_only.status().safe_point) == (0, 3)
        store.close()
        store = manual(open_store)
    with pytest.raises(nosync.NosyncError):
        store.read("rows", 2)
    for t in range(4, 9):
        run(store, t)
        store.sync()
    assert store.safe_point() == 8
    store.compact()
    assert len(files(store, "rows")) == 1, "what is left of a source is merged as before"
    node_of(store).release_inputs()
    assert files(store, "rows") == []


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_catalog_that_is_lost_takes_nothing_of_what_was_safe_with_it(open_store: OpenStore, how: str) -> None:
    """No layer says that inputs need not be there; the safe point that was told says so, and is written down twice."""
    store = manual(open_store)
    for t in range(4):
        run(store, t)
    store.sync()
    node_of(store).release_inputs()
    assert files(store, "rows") == []
    root = store.directory.root
    store.close()
    if how == "removed":
        shutil.rmtree(root / "catalog")
    else:
        for path in (root / "catalog").glob("MANIFEST-*"):
            path.write_bytes(b"junk")
    store = manual(open_store)
    assert store.safe_point() == 3
    assert store.missing() == []
    run(store, 4)
    store.sync()
    assert store.safe_point() == 4


def test_what_cannot_be_made_safe_is_not_released(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = manual(open_store, env)
    run(store, 0)
    store.sync()
    env.fail("sync_file", errno.EIO, times=10**9, matches=lambda path: "sums" in path.parts)
    run(store, 1)
    with pytest.raises(nosync.StorageError):
        store.sync()
    node_of(store).release_inputs()
    assert files(store, "rows") == ["1-2-0.layer"]


def test_a_branch_holds_what_came_after_its_fork(open_store: OpenStore) -> None:
    store = manual(open_store)
    for t in range(4):
        run(store, t)
    store.sync()
    store.node.create_branch("try", "main", 1)
    node_of(store).release_inputs()
    assert files(store, "rows") == ["2-3-0.layer", "3-4-0.layer"]
    assert store.missing() == store.node.missing("try") == []
    (store.directory.root / "layers/rows/raw/0/2-3-0.layer").unlink()
    assert [m.t for m in store.missing()] == [2], "what must be there is still missed"
    store.delete_branch("try")
    assert store.missing() == []
    node_of(store).release_inputs()
    assert files(store, "rows") == []


@pytest.mark.parametrize("policy", ["keep", "disk"])
def test_alone_a_node_keeps_the_only_copy(open_store: OpenStore, policy: str) -> None:
    store = manual(open_store)
    run(store, 0, policy)
    store.sync()
    node_of(store).release_inputs()
    assert files(store, "rows") == ["0-1-0.layer"]


def test_a_flow_that_could_not_compute_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(nosync.FlowError, match="at_safe_point is 'delete', expected one of keep, disk, drop"):
        nosync.Dataflow("f").source("rows", "v bigint", at_safe_point="delete")


def test_what_is_published_again_is_not_removed(open_store: OpenStore) -> None:
    """A branch is deleted and made again with the same code before its files are gone: they are the same files."""
    store = manual(open_store)
    run(store, 0)
    store.sync()
    node = node_of(store)
    id = LayerId(TraceId("sums", "raw", Shard(0)), Description.of_epoch(0))
    node.parts.garbage.forget([id])
    assert node.unknown([id]) == [], "that its file is there means nothing"
    node.note([id])
    store.sync()
    assert files(store, "sums") == ["0-1-0.layer"]
    assert id in node.durable_ids()


@pytest.mark.parametrize("policies", ["kkddd", "ddkkk", "kddkkdd"])
@pytest.mark.parametrize("is_archived", [False, True])
def test_each_epoch_goes_by_what_it_was_sealed_with(open_store: OpenStore, policies: str, is_archived: bool) -> None:
    """A source that is declared otherwise from some epoch on."""
    store = open_store(
        settings=nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=4 if is_archived else 1000)
    )
    whole = [{"k": "keep", "d": "drop"}[letter] for letter in policies for _ in range(6)]
    for t, policy in enumerate(whole):
        run(store, t, policy)
        store.sync()
        node_of(store).release_inputs()
        node_of(store).collect_garbage()
        while node_of(store).merge_once():
            pass
        if is_archived:
            node_of(store).archive_manifests()
    assert (store.missing(), store.safe_point()) == ([], len(whole) - 1)
    kept = [t for t, policy in enumerate(whole) if policy == "keep"]
    node_of(store).collect_garbage()
    names = files(store, "rows")
    there = {t for name in names for t in range(*_span(name))}
    assert there >= {*kept}
    if policies == "ddkkk":  # of a few epochs before a gap little is
        assert len(names) < len(kept), "what is kept is merged"
    released = [t for t, policy in enumerate(whole) if policy == "drop"]
    assert there.isdisjoint(released), "and what is not went"
    backup(store.directory.root, store.directory.root.with_name("copy"))


def _span(name: str) -> tuple[int, int]:
    id = parse_path(PurePosixPath("rows", "raw", "0", name))
    assert id is not None
    return epoch_of(id.description.lower), epoch_of(Time(id.description.upper - 1)) + 1
