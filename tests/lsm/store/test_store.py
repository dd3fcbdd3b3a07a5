"""The store's surface: what it answers, and what it refuses without losing anything."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.columnar.table_diff import compare
from nosync.lsm.compaction.policy import Chain
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore
from tests.helpers.oracles import state_of
from tests.helpers.stores import filled, keys, snapshot, words


def test_the_example_of_the_docstring(open_store: OpenStore) -> None:
    with open_store(retain=1000) as store:
        for t in range(8):
            store.append("counts", shard=0, t=t, rows=words(a=t, b=t), key=["word"], deletes=keys("c"))
            store.seal(t)
        assert state_of(store.read("counts", as_of=7), ["word"]) == {("a",): (7,), ("b",): (7,)}
        assert store.lookup("counts", keys=keys("b", "x"), as_of=3).to_pylist() == [{"word": "b", "n": 3}]
        kinds = store.changes("counts", 3, 7)["_change_type"].to_pylist()
        assert kinds == ["update_preimage", "update_postimage"] * 8
        store.sync()
        assert store.safe_point() == 7
        store.pin("before-upgrade", 7)
        assert store.pins() == {"before-upgrade": 7}


def test_a_store_remembers_after_reopening(open_store: OpenStore) -> None:
    with filled(open_store) as store:
        before = snapshot(store)
    with open_store() as store:
        assert snapshot(store) == before
        assert store.safe_point() == 3
        store.append("counts", t=4, rows=words(z=1))
        store.seal(4)


def test_prefixes_of_the_key(open_store: OpenStore) -> None:
    store = open_store()
    rows = pa.table({"origin": ["JFK", "JFK", "LGA", None], "carrier": ["AA", "UA", "AA", "AA"], "n": [1, 2, 3, 4]})
    store.append("delays", t=0, rows=rows, key=["origin", "carrier"])
    read = lambda **prefix: store.read("delays", as_of=0, prefix=prefix)["n"].to_pylist()  # noqa: E731
    assert sorted(read(origin="JFK")) == [1, 2]
    assert read(origin=None) == [4]
    assert read(origin="JFK", carrier="UA") == [2]
    with pytest.raises(nosync.InvalidInputError, match="not the first of the key"):
        read(carrier="AA")


def test_logs_keep_every_row_in_order(open_store: OpenStore) -> None:
    store = open_store(retain=0)
    for t in range(9):
        store.append("events", t=t, rows=pa.table({"x": [t, t, -t]}), key=[])
        store.seal(t)
    expected = [v for t in range(9) for v in (t, t, -t)]
    assert store.read("events")["x"].to_pylist() == expected
    store.compact()
    assert len(store.layers()) == 1
    assert store.read("events")["x"].to_pylist() == expected
    assert store.read("events", as_of=3)["x"].to_pylist() == expected[:12]
    assert store.changes("events", 2, 4)["_epoch"].to_pylist() == [3, 3, 3, 4, 4, 4]


def test_columns_may_be_added(open_store: OpenStore) -> None:
    store = filled(open_store, 2)
    wider = words(b=1).append_column("tag", pa.array(["new"]))
    store.append("counts", t=2, rows=wider)
    store.seal(2)
    rows = {row["word"]: row["tag"] for row in store.read("counts").to_pylist()}
    assert rows == {"a": None, "w0": None, "w1": None, "b": "new"}
    store.compact()
    assert {row["word"]: row["tag"] for row in store.read("counts").to_pylist()} == rows
    assert store.lookup("counts", keys("a", "b")).column("tag").to_pylist() == [None, "new"]
    with pytest.raises(nosync.SchemaError, match="'tag' .*may be added, not dropped"):
        store.append("counts", t=3, rows=words(b=2))
    with pytest.raises(nosync.SchemaError, match="recorded as int64"):
        store.append("counts", t=3, rows=pa.table({"word": ["a"], "n": ["text"], "tag": ["x"]}))


def test_retain_forgets_and_pins_remember(open_store: OpenStore) -> None:
    store = filled(open_store, 4, retain=2, settings=nosync.StoreSettings(background=False, retain=2, grace_s=0.0))
    store.pin("keep", 2)
    for t in range(4, 10):
        store.append("counts", t=t, rows=words(a=t))
        store.seal(t)
    store.compact()
    assert store.since() == 2
    assert state_of(store.read("counts", as_of=2), ["word"])["a",] == (2,)
    with pytest.raises(nosync.CompactedError, match="retain="):
        store.read("counts", as_of=1)
    with pytest.raises(nosync.CompactedError):
        store.changes("counts", 1, 9)
    store.unpin("keep")
    store.compact()
    assert store.since() == 7
    with pytest.raises(nosync.CompactedError):
        store.read("counts", as_of=2)
    assert state_of(store.read("counts", as_of=7), ["word"])["a",] == (7,)


def test_space_after_merging_is_near_the_live_rows(open_store: OpenStore) -> None:
    store = open_store(retain=0)
    n = 50_000
    for t in range(6):
        store.append("kv", t=t, rows=pa.table({"k": range(n), "v": range(t, n + t)}), key=["k"])
        store.seal(t)
    store.compact()
    assert sum(layer.bytes for layer in store.layers()) <= 1.3 * (16 * n)


def test_shards_and_reading_one(open_store: OpenStore) -> None:
    store = open_store()
    for shard in (0, 1, 2):
        store.append("counts", t=0, shard=shard, rows=words(**{f"w{shard}": shard}), key=["word"])
    store.seal(0)
    assert store.read("counts")["n"].to_pylist() == [0, 1, 2]
    assert store.read("counts", shard=1)["n"].to_pylist() == [1]
    assert store.lookup("counts", keys("w2", "w0"))["n"].to_pylist() == [2, 0]
    with pytest.raises(nosync.UnknownStageError, match="no shard 7"):
        store.read("counts", shard=7)


def test_reading_beside_the_writer(open_store: OpenStore, tmp_path: Path) -> None:
    store = filled(open_store)
    store.sync()
    with nosync.open(tmp_path / "store", read_only=True) as reader:
        assert snapshot(reader) == snapshot(store)
        assert reader.status().safe_point == 3
        assert reader.layers() == store.layers()
        store.compact()
        assert snapshot(reader) == snapshot(store)
        with pytest.raises(nosync.StorageError, match="read_only"):
            reader.append("counts", t=4, rows=words(a=1))


def test_any_process_publishes_without_the_catalog(open_store: OpenStore, tmp_path: Path) -> None:
    store = filled(open_store, 1)
    code = """
import sys
from pathlib import Path
import pyarrow as pa
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.layers.writer import arrange
shard = int(sys.argv[2])
id = LayerId(TraceId("other", "raw", Shard(shard)), Description.of_epoch(0))
rows = arrange(pa.table({"k": range(100), "shard": [shard] * 100}), ["k"], whose="test")
LayerDirectory(Path(sys.argv[1]), 128).publish(id, rows)
"""
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store"), str(i % 3)]) for i in range(6)]
    assert [child.wait() for child in children] == [0] * 6
    assert store.read("other", as_of=0).num_rows == 300
    store.sync()
    assert {layer.level for layer in store.layers() if layer.stage == "other"} == {"disk"}


def test_huge_and_empty_tables(open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False, block_rows=1000))
    n = 200_000
    store.append("kv", t=0, rows=pa.table({"k": range(n), "v": range(n)}), key=["k"])
    store.append("kv", t=1, rows=pa.table({"k": pa.array([], pa.int64()), "v": pa.array([], pa.int64())}))
    store.append("kv", t=2, deletes=pa.table({"k": range(0, n, 2)}))
    for t in range(3):
        store.seal(t)
    store.compact()
    assert store.read("kv", as_of=1).num_rows == n
    table = store.read("kv", as_of=2)
    assert sorted(table["k"].to_pylist()) == list(range(1, n, 2))
    assert store.lookup("kv", pa.table({"k": range(n)}))["v"].to_pylist() == list(range(1, n, 2))
    assert store.lookup("kv", pa.table({"k": pa.array([], pa.int64())})).num_rows == 0


def test_a_closed_store_says_so(open_store: OpenStore) -> None:
    store = filled(open_store)
    store.close()
    store.close()
    with pytest.raises(nosync.StorageError, match="closed"):
        store.append("counts", t=4, rows=words(a=1))


def test_keys_of_many_types_in_one_store(open_store: OpenStore) -> None:
    store = open_store()
    columns = {"d": [datetime.date(2020, 1, 1), None], "b": [True, None], "s": [b"\0", b""], "i": [1, -1]}
    store.append("s", t=0, rows=pa.table({**columns, "v": [1, 2]}), key=list(columns))
    assert store.lookup("s", pa.table(columns), as_of=0)["v"].to_pylist() == [1, 2]
    assert len(set(hash32([pa.array(columns["d"], pa.date32())]))) == 2


def test_background_threads_make_things_durable_and_merge(tmp_path: Path) -> None:
    settings = nosync.StoreSettings(scan_interval_s=0.01, grace_s=0.0, retain=3)
    with nosync.open(tmp_path / "s", settings=settings) as store:
        for t in range(40):
            store.append("counts", t=t, rows=words(a=t, b=t), key=["word"])
            store.seal(t)
        eventually("all is safe", lambda: store.safe_point() == 39)
        eventually("layers are merged", lambda: len(store.layers()) <= 8)
        assert state_of(store.read("counts"), ["word"]) == {("a",): (39,), ("b",): (39,)}


def test_unsealed_layers_are_never_merged(open_store: OpenStore) -> None:
    """Their manifest has yet to name them by their digests."""
    store = filled(open_store, 3)
    for t in range(3, 12):
        store.append("counts", t=t, rows=words(a=t))
    store.compact()
    assert [(layer.lower, layer.upper) for layer in store.layers()] == [(0, 3), *((t, t + 1) for t in range(3, 12))]
    for t in range(3, 12):
        store.seal(t)
    store.compact()
    assert [(layer.lower, layer.upper) for layer in store.layers()] == [(0, 12)]


class StaleEnv(Env):
    """Shows each directory once as it was, as a process sees it that lists just before a merge."""

    def __init__(self) -> None:
        self.stale: dict[Path, list[str]] = {}

    def list_dir(self, path: Path) -> list[str]:
        return self.stale.pop(path, None) or super().list_dir(path)


def test_a_file_that_a_merge_deletes_while_it_is_opened(open_store: OpenStore) -> None:
    store = filled(open_store, 6)
    before = store.read("counts", as_of=5)
    env = StaleEnv()
    shard = store.directory.root / "layers" / "counts" / "raw" / "0"
    env.stale[shard] = env.list_dir(shard)
    store.compact()
    reader = nosync.open(store.directory.root, read_only=True, env=env)
    assert reader.read("counts", as_of=5) == before
    assert not env.stale


def test_a_merge_looks_only_at_traces_of_which_something_changed(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    node = store.node
    assert isinstance(node, Node)
    for t in range(3):
        for stage in ("a", "b"):
            store.append(stage, t=t, rows=words(x=t), key=["word"])
        store.seal(t)
    store.sync()
    while node.merge_once():
        pass
    looked: list[str] = []
    chains = node.parts.compactor.chains

    def seen(trace: TraceId) -> list[Chain]:
        looked.append(trace.stage)
        return chains(trace)

    def looked_at() -> list[str]:
        looked.clear()
        node.merge_once()
        return looked

    monkeypatch.setattr(node.parts.compactor, "chains", seen)
    assert looked_at() == []
    store.append("b", t=3, rows=words(y=1), key=["word"])
    store.node.note([LayerId(TraceId("b", "raw", Shard(0)), Description.of_epoch(3))])
    node.parts.upkeep.drain()
    assert looked_at() == ["b"]
    store.append("a", t=3, rows=words(y=1), key=["word"])
    store.seal(3)
    assert looked_at() == ["a", "b"]
    store.pin("here", 1)
    assert looked_at() == ["a", "b"]
    store.unpin("here")
    assert looked_at() == ["a", "b"]
    assert looked_at() == []


def test_a_column_that_came_later_is_not_there_before_whatever_was_merged(tmp_path: Path) -> None:
    settings = nosync.StoreSettings(background=False)
    with nosync.open(tmp_path / "s", settings=settings) as store:
        for t in range(6):
            wide = {"w": [t]} if t >= 2 else {}
            wider = {"x": [str(t)]} if t >= 4 else {}
            for stage, key in (("state", ["k"]), ("log", [])):
                store.append(stage, t=t, rows=pa.table({"k": [t % 2], "v": [t], **wide, **wider}), key=key)
            store.seal(t)

        def seen() -> list[pa.Table]:
            stages = ("state", "log")
            found = [store.read(stage, as_of=t) for stage in stages for t in range(6)]
            found += [store.changes(stage, a, t) for stage in stages for t in range(6) for a in range(-1, t)]
            found += [store.schema(stage, t).empty_table() for stage in stages for t in range(6)]
            return found

        before = seen()
        assert [t.column_names for t in before[:6]] == [["k", "v"]] * 2 + [["k", "v", "w"]] * 2 + [
            ["k", "v", "w", "x"]
        ] * 2
        for _ in range(2):  # the second time merges what was merged with what came since
            store.compact()
            assert len({layer.path for layer in store.layers()}) == 2
            for mine, theirs in zip(seen(), before, strict=True):
                assert mine.equals(theirs)
            if store.last_sealed() == 5:
                for stage in ("state", "log"):
                    store.append(stage, t=6, rows=pa.table({"k": [9], "v": [9], "w": [9], "x": ["9"]}))
                store.seal(6)
        store.rewind(1)
        for stage in ("state", "log"):
            store.append(stage, t=2, rows=pa.table({"k": [7], "v": [7]}))
        store.seal(2)
        assert store.read("state").column_names == ["k", "v"]
        assert store.read("log").column_names == ["k", "v"]


def test_the_way_to_a_new_store_is_durable(tmp_path: Path) -> None:
    class Noting(Env):
        synced: list[Path]

        def sync_dir(self, path: Path) -> None:
            self.synced.append(path)
            super().sync_dir(path)

    env = Noting()
    env.synced = []
    create_store(tmp_path / "a" / "b" / "store", 16, env)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "store"} <= {*env.synced}


def test_a_value_that_is_no_number_on_both_sides_is_no_difference(open_store: OpenStore) -> None:
    nan = float("nan")
    rows = pa.table({"k": [1, 2, 3, 4], "x": [nan, 0.0, None, nan], "y": pa.array([nan, 1, 2, 3], pa.float32())})
    with open_store() as store:
        store.append("s", t=0, rows=rows, key=["k"])
        store.seal(0)
        other = pa.table(
            {"k": [1, 2, 3, 4], "x": [nan, -0.0, None, None], "y": pa.array([nan, 1, 2, nan], pa.float32())}
        )
        found = compare(store.read("s"), other, ["k"], "stage s")
        assert found.select(["k", "_diff"]).to_pylist() == [{"k": 4, "_diff": "changed"}]


def test_before_its_first_epoch_a_stage_is_empty_and_has_its_key_and_columns(open_store: OpenStore) -> None:
    store = open_store()
    store.append("x", t=5, rows=pa.table({"k": ["a"], "v": [1]}), key=["k"])
    store.seal(5)
    for t in (0, 3):
        changes = store.changes("x", -1, t)
        assert changes.schema == store.changes("x", -1, 5).schema
        assert changes.num_rows == 0
        found = store.lookup("x", pa.table({"k": ["a"]}), t)
        assert (found.num_rows, found.column_names) == (0, ["k", "v"])
        assert store.read("x", t, prefix={"k": "a"}).num_rows == 0
        assert store.diff("x", "main", "main", t).num_rows == 0
    store.append("log", t=6, rows=pa.table({"n": [1]}), key=[])
    store.append("x", t=6, rows=pa.table({"k": ["a"], "v": [1]}), key=["k"])
    store.seal(6)
    assert store.changes("log", -1, 5).schema == store.changes("log", -1, 6).schema


def test_one_name_is_no_list_of_columns(open_store: OpenStore) -> None:
    store = open_store()
    store.append("x", t=0, rows=pa.table({"k": ["a"], "v": [1]}), key=["k"])
    store.seal(0)
    with pytest.raises(nosync.InvalidInputError, match=r"expected a list of names: columns=\['v'\]"):
        store.read("x", columns="v")


def test_a_pin_needs_an_epoch_that_was_sealed(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(nosync.InvalidInputError, match="cannot pin 0: .* there is none yet"):
        store.pin("early", 0)
    for t in (5, 6):
        store.append("x", t=t, rows=pa.table({"k": ["a"], "v": [1]}), key=["k"])
        store.seal(t)
    for t in (4, 7):
        with pytest.raises(nosync.InvalidInputError, match=f"cannot pin {t}: .*, 5 to 6 now"):
            store.pin("early", t)
    store.pin("first", 5)
    assert store.pins() == {"first": 5}


def test_reading_looks_for_new_epochs_as_often_with_many_shards_as_with_one(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a connection each look is a call to the daemon."""
    looks: list[int] = []
    for shards in (1, 20):
        with open_store(f"of_{shards}") as store:
            for shard in range(shards):
                store.append("x", shard=shard, t=0, rows=pa.table({"k": [1]}), key=["k"])
            store.seal(0)
        reader = nosync.open(tmp_path / f"of_{shards}", read_only=True)
        refreshed: list[int] = []
        lines = reader._timelines()
        monkeypatch.setattr(lines, "refresh", lambda seen=refreshed: seen.append(1))
        assert reader.read("x").num_rows == shards
        looks.append(len(refreshed))
    assert looks[0] == looks[1]


def test_an_unknown_stage_is_told_those_that_somebody_named(open_store: OpenStore) -> None:
    """A view is made of dozens of stages, among which its name would not be found."""
    store = open_store()
    for stage in ("totals", "where-9defb9271a", "join-2febb9cc92__left"):
        store.append(stage, t=0, rows=pa.table({"k": [1]}), key=["k"])
    store.seal(0)
    with pytest.raises(nosync.UnknownStageError, match=r"recorded stages: totals \(did you mean 'totals'\?\)"):
        store.read("total")
