"""Stores at the edges: where a trace begins, names of columns, shards that differ, rewinds that are refused."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.branches import read_refs
from nosync.lsm.manifests.input_policy import releasable_until
from nosync.lsm.model.history import Part, View
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, pack
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import seal_json
from nosync.lsm.trace.directory import LayerDirectory
from tests.conftest import OpenStore

ALONE = nosync.StoreSettings(background=False, grace_s=0.0)


def put(store: nosync.Store, t: int, shard: int = 0, **columns: list[int]) -> None:
    store.append("s", t=t, shard=shard, rows=pa.table({"k": [shard * 10], **columns}), key=["k"])


def test_a_trace_is_only_gone_on_with(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    put(store, 5)
    with pytest.raises(nosync.OutOfOrderError, match="begins with timestamp 5"):
        put(store, 3)
    put(store, 5)  # the same again is a success
    store.seal(5)
    assert store.read("s", 5).num_rows == 1
    with pytest.raises(nosync.OutOfOrderError, match="begins with timestamp 5"):
        put(store, 4)


def test_columns_may_be_called_nearly_as_those_that_layers_add(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    put(store, 0, _hashtag=[1], _tombstones=[2])
    store.close()
    store = open_store(settings=ALONE)
    put(store, 1, _hashtag=[3], _tombstones=[4])
    store.append("s", t=2, deletes=pa.table({"k": [0]}))
    store.seal(2)
    assert store.read("s", 1).to_pylist() == [{"k": 0, "_hashtag": 3, "_tombstones": 4}]
    store.sync()
    store.compact()
    assert store.read("s").column_names == ["k", "_hashtag", "_tombstones"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_may_come_to_one_shard_before_the_other(open_store: OpenStore, first: int) -> None:
    store = open_store(settings=ALONE)
    put(store, 0, first, v=[1])
    put(store, 0, 1 - first, v=[2], w=[3])
    store.seal(0)
    found = {row["k"]: row for row in store.read("s").to_pylist()}
    assert found[first * 10].get("w") is None
    assert found[(1 - first) * 10]["w"] == 3
    assert store.lookup("s", pa.table({"k": [0, 10]})).num_rows == 2
    assert store.changes("s", -1, 0).column_names == ["k", "v", "w", "_change_type", "_epoch"]
    store.close()
    store = open_store(settings=ALONE)
    put(store, 1, first, v=[4], w=[5])
    put(store, 1, 1 - first, v=[6], w=[7])
    store.seal(1)
    assert sorted(row["w"] for row in store.read("s").to_pylist()) == [5, 7]
    with pytest.raises(nosync.SchemaError, match="cast it"):
        store.append("s", t=2, rows=pa.table({"k": [0], "v": ["text"], "w": [1]}))


def test_after_a_rewind_an_epoch_is_not_there_before_all_shards_have_it(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    for t in range(3):
        put(store, t, 0, v=[t])
        put(store, t, 1, v=[t])
        store.seal(t)
    store.rewind(1)
    put(store, 2, 0, v=[7])
    with pytest.raises(nosync.NotAvailableError, match="shard 1"):
        store.read("s", 2)
    put(store, 2, 1, v=[8])
    assert sorted(row["v"] for row in store.read("s", 2).to_pylist()) == [7, 8]


def test_an_entry_that_cannot_follow_does_not_count(open_store: OpenStore) -> None:
    """Of a node that changed branches at the same time, taken over before it was known that it did."""
    store = open_store(settings=ALONE)
    put(store, 0)
    store.seal(0)
    store.node.create_branch("b", "main", 0)
    root = store.directory.root
    (root / "branches" / "2.json").write_bytes(seal_json({"do": "delete", "name": "a"}))
    store.close()
    refs = read_refs(root, Env())
    assert (set(refs.names), refs.later) == ({"main", "b"}, (2,))
    with nosync.open(root, read_only=True) as reader:
        assert set(reader.branches()) == {"main", "b"}
        assert "cannot follow the entries before it" in str(reader.verify().errors)
    with pytest.raises(nosync.CorruptionError, match=r"2\.json: cannot follow the entries before it"):
        nosync.open(root)
    (root / "branches" / "2.json").write_bytes(seal_json({"do": "delete"}))
    with pytest.raises(nosync.CorruptionError, match="not an entry of the log"):
        read_refs(root, Env())


def test_deleting_a_branch_takes_nothing_of_an_epoch_that_is_running(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    for t in range(3):
        put(store, t)
        store.seal(t)
    store.node.create_branch("b", "main", 1)
    (raw,) = store.directory.traces("s")
    put(store, 3)  # published by a task, and not sealed yet
    for t in (2, 3):  # the branch has main's layers, and got further than main's manifests did
        store.node.seal(t, [LayerId(raw, Description.of_epoch(t))], "b")
    put(store, 4)
    store.delete_branch("b")
    for t in (3, 4):
        store.seal(t)
    assert store.missing() == []
    assert store.read("s").num_rows == 1


@pytest.mark.parametrize("name", ["main", "kept", "no such name", "../x", "A"])
def test_a_rewind_or_promotion_that_is_refused_changes_nothing(open_store: OpenStore, name: str) -> None:
    store = open_store(settings=ALONE)
    for t in range(4):
        put(store, t)
        store.seal(t)
    store.node.create_branch("kept", "main", 1)
    store.node.create_branch("other", "main", 2)
    before = store.branches(), list((store.directory.root / "branches").iterdir())
    for change in (lambda: store.rewind(1, name), lambda: store.node.promote("other", name)):
        with pytest.raises(nosync.InvalidInputError):
            change()
        assert (store.branches(), list((store.directory.root / "branches").iterdir())) == before
    store.close()
    assert open_store(settings=ALONE).last_sealed() == 3


def test_a_rewind_is_one_entry_of_the_log(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    for t in range(4):
        put(store, t)
        store.seal(t)
    assert store.rewind(1) == "before-rewind-1"
    assert len(list((store.directory.root / "branches").iterdir())) == 1
    assert set(store.branches()) == {"main", "before-rewind-1"}


def test_a_branch_cannot_begin_where_history_was_merged_away(open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False, retain=1))
    for t in range(5):
        put(store, t)
        store.seal(t)
    with pytest.raises(nosync.CompactedError, match="before 3 was merged away"):
        store.node.create_branch("b", "main", 1)
    assert set(store.branches()) == {"main"}


def test_names_of_branches_that_an_earlier_version_took_can_still_be_read(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    for t in range(3):
        put(store, t)
        store.seal(t)
    root = store.directory.root
    store.close()
    (root / "branches").mkdir(exist_ok=True)
    create = {"do": "create", "name": "rewind-1", "line": "rewind-1", "parent": "main", "at": 1, "changed": []}
    (root / "branches" / "1.json").write_bytes(seal_json(create))
    promote = {"do": "promote", "name": "rewind-1", "keep_as": "Before The Fix"}
    (root / "branches" / "2.json").write_bytes(seal_json(promote))
    assert set(read_refs(root, Env()).names) == {"main", "Before The Fix"}
    assert open_store(settings=ALONE).read("s", 2, branch="Before The Fix").num_rows == 1


def test_what_a_line_that_was_rewound_has_of_its_own_holds_its_inputs(open_store: OpenStore) -> None:
    store = open_store(settings=ALONE)
    node = store.node
    for t in range(6):
        put(store, t)
        store.seal(t)
    assert releasable_until(node.timelines, 5) == 5
    store.rewind(3, "old")
    assert releasable_until(node.timelines, 9) == 3
    node.create_branch("b", "old", 5)
    node.create_branch("c", "main", 1)
    assert releasable_until(node.timelines, 9) == 1
    node.delete_branch("c")
    assert releasable_until(node.timelines, 9) == 3
    node.delete_branch("b")
    node.delete_branch("old")
    assert releasable_until(node.timelines, 9) == 9


def test_the_state_inside_a_loop_ends_where_the_parents_does(tmp_path: Path) -> None:
    """A merge of the parent's layers went past the fork."""
    (tmp_path / "tmp").mkdir()
    directory = LayerDirectory(tmp_path, 8)
    parent, branch = TraceId("loop", "a", Shard(0, 1)), TraceId("loop", "b", Shard(0, 1))

    def publish(trace: TraceId, t: int, key: int) -> None:
        rows = arrange(pa.table({"k": [key], "v": [t]}), ["k"], whose="test")
        directory.publish(LayerId(trace, Description.of_epoch(t)), rows)

    for t in range(10):
        publish(parent, t, t)
    layers = [directory.reader(LayerId(parent, Description.of_epoch(t))) for t in range(10)]
    for _ in Merge(tmp_path, layers, since=Time(0), bottom=True, env=Env()).steps():
        pass
    for layer in layers:
        layer.path.unlink()
        directory.forget(layer.id)
    for t in (5, 6):
        publish(branch, t, 50 + t)
    view = View(branch, pack(5), base=(Part(parent, Time(0), pack(5)),))
    inside = directory.open_rounds(view, 7, 0)
    before = Time(pack(7) - 1)
    keys = sorted(pa.Table.from_batches(inside.scan(before), schema=inside.schema)["k"].to_pylist())
    assert keys == [0, 1, 2, 3, 4, 55, 56]


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with ExitStack() as held:
        for _ in range(1100):
            held.enter_context(open("/dev/null"))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_merges_in_a_process_where_many_files_are_open(open_store: OpenStore, many_files: None) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False, grace_s=0.0, merge_process_rows=0))
    for t in range(6):
        put(store, t)
        store.seal(t)
    store.sync()
    assert store.compact() == 1
    (trace,) = store.directory.traces("s")
    assert len(store.directory.descriptions(trace)) == 1
    assert list((store.directory.root / "tmp").iterdir()) == []


def test_a_merge_process_that_is_stopped_leaves_nothing(open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False, grace_s=0.0, merge_process_rows=0))
    for t in range(6):
        store.append("s", t=t, rows=pa.table({"k": range(200_000), "v": [t] * 200_000}), key=["k"])
        store.seal(t)
    store.sync()
    node = store.node
    assert isinstance(node, Node)
    temporary = store.directory.root / "tmp"
    assert not node.parts.compactor.merge_once(lambda: any(temporary.iterdir()), whole=True), (
        "it was stopped when it had begun to write"
    )
    assert list(temporary.iterdir()) == []


def test_rows_of_logs_are_merged_in_blocks_that_arrow_can_hold(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nosync.lsm.layers.merging.BLOCK_BYTES", 10_000)
    store = open_store(settings=ALONE)
    for t in range(20):
        store.append("log", t=t, rows=pa.table({"text": ["x" * 1500, "y" * 1500]}), key=[])
        store.seal(t)
    store.sync()
    store.compact()
    (trace,) = store.directory.traces("log")
    reader = store.directory.reader_of_any(trace)
    assert reader.block_count >= 6
    assert all(block.data.nbytes <= 10_000 for block in reader.blocks())
    assert store.read("log").num_rows == 40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.append("s", t=0, rows=[{"k": 1}], key=["k"]), "pa.Table.from_pylist"),
        (lambda store: store.append("s", t=0, rows={"k": [1]}, key=["k"]), "make a table of it"),
        (lambda store: store.append("s", t=0, rows=pa.table({"k": [1]}), key=["k", "k"]), "names a column twice"),
        (lambda store: nosync.open(store.directory.root, read_only=True, retain=3), "its writer says"),
        (lambda store: nosync.open(store.directory.root, settings={"retain": 3}), "expected nosync.StoreSettings"),
        (lambda _: nosync.StoreSettings(block_rows=1.5), "expected a whole number"),
        (lambda _: nosync.StoreSettings(scan_interval_s=float("inf")), "expected seconds"),
        (lambda _: nosync.StoreSettings(grace_s=float("nan")), "expected seconds"),
    ],
)
def test_what_newcomers_give_is_answered(open_store: OpenStore, call: Any, message: str) -> None:
    with pytest.raises(nosync.InvalidInputError, match=message):
        call(open_store(settings=ALONE))
