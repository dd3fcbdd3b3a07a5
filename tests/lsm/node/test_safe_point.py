"""What the safe point waits for where a node has peers: layers and manifests alike; and that it does not go back."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.model.layer import Description, LayerId, Record, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.node import Node
from nosync.testing import FaultyEnv
from tests.conftest import OpenStore
from tests.helpers.peers import Peers


def seal(store: nosync.Store, t: int, copies: int) -> None:
    store.append("s", t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
    id = LayerId(TraceId("s", "raw", Shard(0)), Description.of_epoch(t))
    store.node.seal(t, [id], copies={"s": copies})
    store.sync()


def test_sync_waits_for_what_was_published_before_it_and_for_nothing_else(open_store: OpenStore) -> None:
    """While it works a watcher tells once more of what is durable by then, and a job publishes the next epoch."""
    store = open_store(settings=nosync.StoreSettings(background=False))
    node = store.node
    assert isinstance(node, Node)

    class Watcher(Peers):
        def held(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
            super().held(added, gone, dropped=dropped)
            if len(self.announced) == 1:
                node.note([record.id for record in added])
                store.append("s", t=1, rows=pa.table({"k": [1], "v": [1]}), key=["k"])

    node.announcer.listen(Watcher(1, 1))
    store.append("s", t=0, rows=pa.table({"k": [1], "v": [0]}), key=["k"])
    store.sync()
    node.announcer.listen(Peers(1, 1))
    store.sync()
    assert len(node.durable_ids()) == 2


def test_what_is_told_is_an_epoch(open_store: OpenStore) -> None:
    """It goes to peers, who could do nothing with `none`."""
    store = open_store()
    assert isinstance(store.node, Node)
    store.node.announcer.listen(peers := Peers(1, 1))
    seal(store, 0, 2)
    assert store.safe_point() is None
    assert store.node.safe_points.announced() == {}
    peers.layers = peers.files = 2
    assert store.safe_point() == 0
    assert store.node.safe_points.announced() == {"main": 0}


@pytest.mark.parametrize(
    ("required", "layers", "files", "safe"),
    [(2, 2, 2, 0), (2, 1, 2, None), (2, 2, 1, None), (3, 2, 3, None), (1, 1, 1, 0), (0, 0, 0, 0)],
)
def test_it_waits_for_copies_of_layers_and_of_manifests(
    open_store: OpenStore, required: int, layers: int, files: int, safe: int | None
) -> None:
    store = open_store()
    assert isinstance(store.node, Node)
    store.node.announcer.listen(peers := Peers(layers, files))
    seal(store, 0, required)
    assert store.safe_point() == safe
    announced = [one for one in peers.announced if not one.startswith("times/")]
    assert announced == ["stage s shard 0 timestamp 0", "manifests/main/0.json"]


def test_it_does_not_go_back_when_copies_are_lost(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store()
    assert isinstance(store.node, Node)
    store.node.announcer.listen(peers := Peers(2, 2))
    seal(store, 0, 2)
    assert store.safe_point() == 0
    peers.layers = 1
    seal(store, 1, 2)
    assert store.safe_point() == 0
    store.close()
    again = open_store()
    assert isinstance(again.node, Node)
    again.node.announcer.listen(Peers(1, 1))
    assert again.safe_point() == 0, "what was told stays, a restart included"
    assert isinstance(again.node, Node)
    again.node.announcer.listen(Peers(2, 2))
    assert again.safe_point() == 1


def test_epochs_in_an_archive_wait_for_copies_too(open_store: OpenStore) -> None:
    """Where what was told is forgotten: merged layers that are durable here are not on other nodes yet."""
    settings = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=2)
    store = open_store(settings=settings)
    assert isinstance(store.node, Node)
    store.node.announcer.listen(peers := Peers(2, 2))
    for t in range(6):
        seal(store, t, 2)
    store.node.archive_manifests()
    store.compact()
    assert store.node.timelines.archives()
    peers.layers = peers.files = 1
    store.node.safe_points._written["main"] = Epoch(-1)
    store.node.safe_points.something_changed()
    assert store.safe_point() is None
    peers.layers = peers.files = 2
    assert store.safe_point() == 5


def test_manifests_stay_until_the_archive_that_came_is_durable(open_store: OpenStore) -> None:
    """An archive that a peer sent is a file that a power cut may take."""
    settings = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=2)
    store = open_store("here", settings=settings, env=(env := FaultyEnv()))
    other = open_store("there", settings=settings)
    for t in range(5):
        for each in (store, other):
            seal(each, t, 1)
    assert isinstance(store.node, Node)
    assert isinstance(other.node, Node)
    other.node.archive_manifests()
    main = store.directory.root / "manifests" / "main"
    shutil.copy(other.directory.root / "manifests" / "main" / "0-1.json", main)
    env.fail("sync_file", errno.EIO, times=2, matches=lambda path: path.name == "0-1.json")
    store.node.note_files([PurePosixPath("manifests/main/0-1.json")])
    store.node.learn()
    with pytest.raises(nosync.StorageError):
        store.sync()
    store.node.archive_manifests()
    assert (main / "0.json").exists()
    for _ in range(2):
        with contextlib.suppress(nosync.StorageError):
            store.sync()
    store.node.archive_manifests()
    assert not (main / "0.json").exists()
    assert store.safe_point() == 4
