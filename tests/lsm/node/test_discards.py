"""Who has a store open while its node discards contents, and gets others of the same names, sees those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa

import nosync
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import Description, LayerId
from nosync.lsm.model.timestamp import END_OF_TIME
from nosync.lsm.node.discards import DiscardedVersions
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import DISCARDED
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import Hello, Send, SessionId, Want
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica
from nosync.testing import FaultyEnv
from tests.conftest import OpenStore
from tests.helpers.peers import Peers

EPOCHS = 8


class Reading(Env):
    def __init__(self) -> None:
        self.read_paths: list[Path] = []

    def read(self, path: Path) -> bytes:
        self.read_paths.append(path)
        return super().read(path)


def record(store: nosync.Store, epochs: range, more: int = 0) -> None:
    for t in epochs:
        store.append("c", t=t, rows=pa.table({"k": [1, 2], "v": [t + more, t]}), key=["k"])
        store.seal(t)
    store.sync()


def values(store: nosync.Store, t: int | None = None) -> list[int]:
    return sorted(store.read("c", t).column("v").to_pylist())


def discard(store: nosync.Store, first: int) -> None:
    store.node.discard([], [PurePosixPath(f"manifests/main/{first}.json")])
    store.node.make_durable_now()


def test_a_reader_sees_what_took_the_place_of_what_was_discarded(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    record(store, range(EPOCHS))
    with nosync.open(tmp_path / "store", read_only=True) as reader:
        assert values(reader) == [7, 7]
        assert values(reader, 3) == [3, 3]
        discard(store, 3)
        assert reader.last_sealed() == 2
        assert values(reader) == [2, 2]
    with nosync.open(tmp_path / "store", read_only=True) as reader:
        record(store, range(3, EPOCHS), more=50)
        assert values(reader) == [7, 57]
        discard(store, 3)
        record(store, range(3, EPOCHS), more=100)  # all at once, as the reader sees it
        assert values(reader) == [7, 107]
        assert values(reader, 3) == [3, 103]
        assert values(reader, 2) == [2, 2]
        assert reader.changes("c", 4, 5).column("v").to_pylist() == [104, 105, 4, 5]


def test_a_task_takes_no_layer_for_recorded_that_was_discarded(open_store: OpenStore) -> None:
    """Its process has the layer mapped, and asks for it by its name."""
    store = open_store()
    record(store, range(EPOCHS))
    of_the_task = LayerDirectory(store.directory.root, store.directory.key_groups)
    (trace,) = of_the_task.traces("c")
    id = LayerId(trace, Description.of_epoch(5))
    before = of_the_task.recorded(id)
    assert of_the_task.reader(id) is of_the_task.reader(id)
    discard(store, 3)
    record(store, range(3, EPOCHS), more=100)
    found = of_the_task.recorded(id)
    assert found.digest != before.digest
    assert found.digest == store.directory.recorded(id).digest


def test_a_look_at_the_newest_epoch_is_enough(open_store: OpenStore) -> None:
    store = open_store()
    record(store, range(EPOCHS))
    of_a_job = Timelines(store.directory.root, store.directory.env)
    of_a_job.notice_changes("main")
    before = of_a_job.manifests()[5]
    of_a_job.notice_changes("main")
    assert of_a_job.manifests()[5] is before, "nothing was read again"
    discard(store, 5)
    of_a_job.notice_changes("other")
    assert of_a_job.last_sealed() == EPOCHS - 1
    of_a_job.notice_changes("main")
    assert of_a_job.last_sealed() == 4
    record(store, range(5, EPOCHS), more=50)
    of_a_job.refresh()
    assert of_a_job.manifests()[5] not in (before, None)
    discard(store, 5)
    record(store, range(5, EPOCHS))
    of_a_job.notice_changes()
    assert of_a_job.manifests()[5] == before


def test_branches_that_others_count_for_are_noticed(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    record(store, range(EPOCHS))
    store.node.create_branch("ours", "main", 5)
    with nosync.open(tmp_path / "store", read_only=True) as reader:
        assert sorted(reader.branches()) == ["main", "ours"]
        store.node.discard([], [PurePosixPath("branches/1.json")])
        store.node.create_branch("theirs", "main", 3)
        assert sorted(reader.branches()) == ["main", "theirs"]


def test_what_is_discarded_is_remembered(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    record(store, range(EPOCHS))
    (trace,) = store.directory.traces("c")
    digests = {f"layers/{id.path}": store.directory.recorded(id).digest for id in store.directory.layer_ids()}
    gone = store.node.discard([], [PurePosixPath("manifests/main/3.json")])
    layers = [f"layers/{LayerId(trace, Description.of_epoch(t)).path}" for t in range(3, EPOCHS)]
    assert {*map(str, gone)} == {*layers, *(f"manifests/main/{t}.json" for t in range(3, EPOCHS))}
    kept = DiscardedVersions(store.directory.root, store.directory.env).digests
    assert set(kept) == set(map(str, gone))
    assert all(kept[name] == digest for name, digest in digests.items() if name in kept)
    record(store, range(3, EPOCHS), more=50)
    store.node.discard([], [PurePosixPath("manifests/main/6.json")])
    reversed_ = DiscardedVersions(store.directory.root, store.directory.env).digests
    assert {name for name in reversed_ if name.startswith("manifests")} == {
        "manifests/main/6.json",
        "manifests/main/7.json",
    }, "those before count again, where they are what took the place"
    (store.directory.root / DISCARDED).write_bytes(b"torn")
    assert DiscardedVersions(store.directory.root, store.directory.env).digests == {}, (
        "said in the log, and no reason not to start"
    )


def test_a_peer_that_holds_what_was_discarded_has_another_history() -> None:
    replica = Replica(NodeId("n1"), "i1", "s", [NodeId("n1"), NodeId("n2"), NodeId("n3")], 3)
    layer = "layers/c/raw/0/{}.layer"
    for node, digest, session in ((NodeId("n2"), "wrong", 2), (NodeId("n3"), "right", 3)):
        replica.connected(SessionId(session))
        replica.received(SessionId(session), Hello(node, f"i{session}", "s", 3))
        held = [FileVersion(FileName(f"manifests/main/{t}.json"), digest) for t in (4, 5)] + [
            FileVersion(FileName("manifests/main/3.json"), "same")
        ]
        merged = [FileVersion(FileName(layer.format(f"{0}-{6 << 20}-0")), f"merged {digest}")]
        replica.peers[node].seq, replica.peers[node].is_known = 0, True
        for one in [*held, *merged]:
            replica.peers[node].holds.add(one)
            replica.peers[node].dirty.add(one.name.place)
    replica.discard({"manifests/main/4.json": "wrong"}, END_OF_TIME)
    asked = {
        effect.session: {wanted.held.digest for wanted in effect.message.files}
        for effect in replica.tick(0.1)
        if isinstance(effect, Send) and isinstance(effect.message, Want)
    }
    assert asked == {SessionId(2): {"same"}, SessionId(3): {"right", "merged right"}}
    assert replica.copies.conflicts() == {}
    assert replica.copies.discarded_elsewhere() == {"manifests/main/4.json": NodeId("n2")}


class Dropping(Peers):
    """Is told of what goes."""

    def dropped_files(self, paths: Sequence[PurePosixPath]) -> None:
        self.dropped = [str(path) for path in paths]


def test_what_a_peer_gives_back_of_epochs_that_were_dropped_goes_again(open_store: OpenStore) -> None:
    """It had not heard that nobody needs them when it was asked."""
    env = FaultyEnv()
    store = open_store(env=env)
    record(store, range(EPOCHS))
    root = store.directory.root
    files = {path: path.read_bytes() for path in root.rglob("*") if path.suffix in (".layer", ".json")}
    store.rewind(3, keep_as="")
    store.node.collect_garbage()
    gone = {path: text for path, text in files.items() if not path.exists()}
    assert {path.name for path in gone} == {
        *(f"{t}.json" for t in range(4, EPOCHS)),
        *(f"{t}-{t + 1}-0.layer" for t in range(4, EPOCHS)),
    }
    for path, text in gone.items():
        path.write_bytes(text)
    store.node.announcer.listen(listener := Dropping(1, 1))
    env.now_s += 61.0
    store.node.parts.discovery.look()
    store.node.make_durable_now()
    env.now_s += 61.0
    store.node.parts.discovery.look()
    store.node.collect_garbage()
    assert not [path for path in gone if path.exists()]
    assert len(listener.dropped) in (0, EPOCHS - 4)
    store.node.announcer.listen(None)
    assert store.last_sealed() == 3


def test_who_sealed_an_epoch_sees_that_another_one_took_its_place(open_store: OpenStore, tmp_path: Path) -> None:
    """It knows which file it made, and need not read it to see that it is still the same."""
    store = open_store()
    record(store, range(EPOCHS))
    of_a_job = Sealer(LayerDirectory(store.directory.root, store.directory.key_groups, env := Reading()), 1)
    published = store.append("c", t=EPOCHS, rows=pa.table({"k": [1], "v": [1]}))
    before, _ = of_a_job.seal(EPOCHS, [published.id], MAIN, None, None)
    env.read_paths.clear()
    of_a_job.timelines.notice_changes()
    assert not env.read_paths
    assert of_a_job.timelines.manifests()[EPOCHS] is before
    other = Manifest(before.timeline, before.t, before.entries, {"of": "another job"})
    (tmp_path / "other").write_bytes(other.to_json())
    (tmp_path / "other").replace(store.directory.root / before.path)
    of_a_job.timelines.notice_changes()
    assert of_a_job.timelines.manifests()[EPOCHS].meta == {"of": "another job"}


def test_an_epoch_lists_the_layer_that_stands_when_it_is_sealed(open_store: OpenStore) -> None:
    """And not what the same process wrote there before."""
    store, other = open_store(), open_store("other")
    record(store, range(EPOCHS))
    record(other, range(EPOCHS))
    mine, theirs = (
        one.append("c", t=EPOCHS, rows=pa.table({"k": [1], "v": [v]})) for one, v in ((store, 1), (other, 2))
    )
    other.directory.path_of(theirs.id).replace(store.directory.path_of(mine.id))
    (entry,) = store.seal(EPOCHS).entries
    assert entry.digest == theirs.digest != mine.digest
