"""The store's surface: what it answers, and what it refuses without losing anything."""

from __future__ import annotations

import datetime
import errno
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

import nosync
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.columnar.table_diff import compare
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.policy import Chain
from nosync.lsm.compaction.worker import OUT_OF_THE_WAY, MergeProcess
from nosync.lsm.layers.writer import Published
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import ZERO
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.store_marker import create_store
from nosync.testing.daemon_cluster import eventually
from nosync.testing.faulty_env import FaultyEnv
from tests.conftest import OpenStore
from tests.helpers.oracles import state_of
from tests.helpers.stores import filled, snapshot, words


def keys(*names: str) -> pa.Table:
    return pa.table({"word": pa.array(names, pa.string())})


# --- answers ------------------------------------------------------------------------------------------------------------


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


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": pa.table({"n": [1]})}, nosync.SchemaError, "key column 'word' is missing"),
        ({"rows": pa.table({"word": ["a"], "n": [1.5]})}, nosync.SchemaError, "recorded as int64"),
        ({"rows": pa.table({"word": ["a"]})}, nosync.SchemaError, "'n' .*missing"),
        ({"rows": pa.table({"word": ["a"], "n": [1], "_time": [1]})}, nosync.SchemaError, "nosync uses itself"),
        ({"rows": pa.table({"word": ["a", "a"], "n": [1, 2]})}, nosync.InvalidInputError, "'a'.* occurs twice"),
        ({"rows": words(a=1), "deletes": keys("a")}, nosync.InvalidInputError, "occurs twice"),
        ({"rows": words(a=1), "deletes": pa.table({"word": [1]})}, nosync.SchemaError, "int64 in the deletes"),
        ({"rows": words(a=1), "t": 6}, nosync.OutOfOrderError, "next timestamp of this trace is 4"),
        ({"rows": words(a=1), "t": 1}, nosync.DeterminismError, "timestamp 1: computed twice"),
        ({"rows": words(a=1), "t": -1}, nosync.InvalidInputError, "not an epoch number"),
        ({"rows": words(a=1), "key": ["n"]}, nosync.SchemaError, "recorded with key"),
        ({"rows": words(a=1), "key": "word"}, nosync.InvalidInputError, r"\['word'\]"),
        ({"rows": words(a=1), "stage": "../etc"}, nosync.InvalidInputError, "not a valid name"),
        ({"rows": words(a=1), "stage": "a/b"}, nosync.InvalidInputError, "not a valid name"),
        ({"rows": words(a=1), "stage": "late", "key": ["word"], "t": 2}, nosync.OutOfOrderError, "sealed without"),
        ({"rows": words(a=1), "stage": "new"}, nosync.InvalidInputError, "needs key="),
        ({"rows": words(a=1), "shard": -1}, nosync.InvalidInputError, "does not exist"),
        ({}, nosync.InvalidInputError, "give rows, deletes or both"),
    ],
)
def test_what_append_refuses(
    open_store: OpenStore, change: dict[str, object], error: type[Exception], message: str
) -> None:
    store = filled(open_store)
    before, layers = snapshot(store), store.layers()
    arguments = {"stage": "counts", "t": 4, **change}
    with pytest.raises(error, match=message):
        store.append(arguments.pop("stage"), **arguments)  # type: ignore[arg-type]
    assert (snapshot(store), store.layers()) == (before, layers)
    store.append("counts", t=4, rows=words(ok=1))  # and goes on
    store.seal(4)


def test_a_nan_is_a_key_and_a_map_is_none(open_store: OpenStore) -> None:
    store, nan = open_store(), float("nan")
    with pytest.raises(nosync.InvalidInputError, match="occurs twice"):
        store.append("s", t=0, rows=pa.table({"x": [nan, nan], "v": [1, 2]}), key=["x"])
    maps = pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    with pytest.raises(nosync.SchemaError, match=r"'m' has type map.*array_sort\(map_entries\(m\)\)"):
        store.append("s", t=0, rows=maps, key=["m"])
    assert store.layers() == []
    for t, x in enumerate((nan, 0.0, nan, -0.0)):
        store.append("s", t=t, rows=pa.table({"x": [x], "v": [t]}), key=["x"])
        store.seal(t)
    store.sync()
    assert store.lookup("s", pa.table({"x": [nan, 0.0, 1.0]}))["v"].to_pylist() == [2, 3]
    assert store.read("s", prefix={"x": nan})["v"].to_pylist() == [2]
    store.append("s", t=4, deletes=pa.table({"x": [nan]}), key=["x"])
    store.seal(4)
    assert store.read("s")["v"].to_pylist() == [3]


def test_the_same_layer_again_is_a_success(open_store: OpenStore) -> None:
    store = filled(open_store)
    first = store.append("counts", t=4, rows=words(a=1, b=2))
    again = store.append("counts", t=4, rows=words(b=2, a=1))
    assert (again.digest, again.existed) == (first.digest, True)
    manifest = store.seal(4)
    assert store.seal(4) == manifest


def test_sealing(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(nosync.NotAvailableError, match="nothing was recorded"):
        store.seal(0)
    store.append("counts", t=5, rows=words(a=1), key=["word"])
    store.append("counts", t=5, shard=1, rows=words(b=1))
    store.seal(5)
    store.append("counts", t=6, rows=words(a=2))
    with pytest.raises(nosync.NotAvailableError, match="shard 1 recorded nothing at 6"):
        store.seal(6)
    store.seal(6, fill_missing=True)
    with pytest.raises(nosync.OutOfOrderError, match="next timestamp of branch main is 7"):
        store.seal(8)
    assert store.read("counts", as_of=4).num_rows == 0, "before it began, the stage was empty"
    store.append("late", t=7, rows=words(a=1), key=["word"])
    store.append("counts", t=7, rows=words())
    store.append("counts", t=7, shard=1, rows=words())
    assert {e.id.trace.stage for e in store.seal(7).entries} == {"counts", "late"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.read("nope"), nosync.UnknownStageError, "recorded stages: counts"),
        (lambda s: s.read("counts", as_of=9), nosync.NotAvailableError, "recorded up to 3"),
        (lambda s: s.read("counts", as_of=-3), nosync.InvalidInputError, "not an epoch"),
        (lambda s: s.read("counts", columns=["zzz"]), nosync.SchemaError, "no column 'zzz'"),
        (lambda s: s.lookup("counts", pa.table({"n": [1]})), nosync.SchemaError, "key column 'word' is missing"),
        (lambda s: s.lookup("counts", pa.table({"word": [[1]]})), nosync.SchemaError, "word"),
        (lambda s: s.changes("counts", 3, 1), nosync.InvalidInputError, "must not be after"),
        (lambda s: s.pin("x", 9), nosync.InvalidInputError, "0 to 3"),
        (lambda s: s.pin("x/y", 2), nosync.InvalidInputError, "not a valid name"),
        (lambda s: s.unpin("x"), nosync.InvalidInputError, "no pin 'x'"),
        (lambda s: (s.pin("x", 1), s.pin("x", 2)), nosync.InvalidInputError, "already holds timestamp 1"),
    ],
)
def test_what_reads_refuse(open_store: OpenStore, call: object, error: type[Exception], message: str) -> None:
    store = filled(open_store)
    with pytest.raises(error, match=message):
        call(store)  # type: ignore[operator]


def test_nothing_sealed_yet(open_store: OpenStore) -> None:
    store = open_store()
    store.append("counts", t=0, rows=words(a=1), key=["word"])
    with pytest.raises(nosync.NotAvailableError, match="no timestamp is sealed"):
        store.read("counts")
    assert store.read("counts", as_of=0).num_rows == 1


def test_directories_that_are_no_stores(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "data.csv").write_text("x")
    with pytest.raises(nosync.NotAStoreError, match=r"data\.csv"):
        nosync.open(foreign)
    assert [p.name for p in foreign.iterdir()] == ["data.csv"]
    with pytest.raises(nosync.NotAStoreError, match="does not exist"):
        nosync.open(tmp_path / "nothing", read_only=True)
    with pytest.raises(nosync.NotAStoreError, match="is a file"):
        nosync.open(foreign / "data.csv")


def test_what_others_put_beside_our_files_is_left_alone(open_store: OpenStore, tmp_path: Path) -> None:
    filled(open_store).close()
    root = tmp_path / "store"
    for place in ("layers", "layers/counts", "layers/counts/raw", "layers/counts/raw/0", "manifests", "manifests/main"):
        (root / place / ".DS_Store").write_text("junk")
    for name in ("branches/.DS_Store", "branches/notes.json", "pins/.DS_Store", "sinks/.DS_Store", "tmp/mine/notes"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("junk")
    store = open_store()
    assert store.read("counts").num_rows
    store.compact()
    assert not store.status().problems
    assert {Path(error.split(":")[0]).name for error in store.verify().errors} == {".DS_Store"}, "said, and no more"
    assert (root / "tmp/mine/notes").exists()


def test_making_a_store_may_be_interrupted(tmp_path: Path) -> None:
    for name in ("layers", "manifests", "tmp"):
        (tmp_path / "s" / name).mkdir(parents=True)
    (tmp_path / "s" / "tmp" / secrets.token_hex(8)).write_text("half of a mar")
    with nosync.open(tmp_path / "s") as store:
        assert store.last_sealed() is None
    for name in ("tmp/notes", "layers/notes", "other/notes"):
        (tmp_path / name / name).parent.mkdir(parents=True)
        (tmp_path / name / name).write_text("not of a store")
        with pytest.raises(nosync.NotAStoreError, match="is not empty"):
            nosync.open(tmp_path / name)
        assert (tmp_path / name / name).read_text() == "not of a store"


def test_a_new_store_is_made_beside_the_secret_of_a_door(tmp_path: Path) -> None:
    """All hosts are given the same one before there are stores."""
    (tmp_path / "checkpoint-secret").write_text("ab" * 24)
    nosync.open(tmp_path).close()
    assert (tmp_path / "checkpoint-secret").read_text() == "ab" * 24


def test_of_two_that_make_a_store_both_have_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Env):
        def link(self, source: Path, target: Path) -> None:
            if not target.exists():
                create_store(tmp_path / "s", 16, Env(), store_id="quicker")
            super().link(source, target)

    assert create_store(tmp_path / "s", 16, Slow()).store_id == "quicker"


def test_paths_as_users_give_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may go to another directory; what another file system or a daemon keeps is not made here by mistake."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with nosync.open("s") as store:
        monkeypatch.chdir("/")
        store.append("counts", t=0, rows=words(a=1), key=["word"])
        store.seal(0)
        store.sync()
    for same in (tmp_path / "s", (tmp_path / "s").as_uri(), f"file:{tmp_path}/s"):
        with nosync.open(same, read_only=True) as store:
            assert store.last_sealed() == 0
    nosync.open("~/mine").close()
    assert (tmp_path / "home" / "mine" / "NOSYNC").exists()
    monkeypatch.chdir(tmp_path)
    for path, message in (
        ("s3a://bucket/state", "is not on this host"), ("dbfs:/state", "is not on this host"),
        ("host.example:7501", r"nosync.connect\('host.example:7501'\)"), (7, "7 is a int, expected the path"),
    ):  # fmt: skip
        for call in (nosync.open, nosync.ParquetSink) if not str(path).startswith("s3a") else (nosync.open,):
            with pytest.raises(nosync.InvalidInputError, match=message):
                call(path)  # type: ignore[arg-type]
    what = "a store is a directory of a file system that this host has or mounts.*daemons keep copies"
    for path in ("s3a://bucket/x", "abfss://c@account.dfs.core.windows.net/x", "gs://b/x", "hdfs://host:8020/x"):
        with pytest.raises(nosync.InvalidInputError, match=f"^{path} is not on this host: {what}") as raised:
            nosync.open(path)
        assert "\n" not in str(raised.value)
    for path in ("s3a://bucket/x", "abfss://c@account.dfs.core.windows.net/x", "hdfs://host:8020/x"):
        with pytest.raises(nosync.InvalidInputError, match="expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"):
            nosync.ParquetSink(path)
    with pytest.raises(nosync.InvalidInputError, match="anything else takes a CallbackSink"):
        nosync.ParquetSink("dbfs:/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "s"]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"the path is empty: give that of a directory; '\.' is"),
        (b"s", "b's' is a bytes, expected the path"),
        ("s\0", "has a character of number 0"),
        (os.fsdecode(b"caf\xe9"), r"'caf\\udce9' is not UTF-8"),
        ("n" * 256, "File name too long; a name has at most 255 bytes and a path 4095"),
        ("deep/" * 820, "File name too long; a name has at most 255 bytes and a path 4095"),
        ("dangling", "dangling is a symlink to nowhere, which does not exist: make that first"),
        ("dangling/s", "dangling is a symlink to nowhere, which does not exist: make that first"),
        ("loop", "its symlinks lead to each other"),
        ("file/s", "file is a file, so .*s cannot be a directory in it"),
        ("~of nobody/s", "give an absolute path"),
    ],
)  # fmt: skip
def test_paths_that_no_directory_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str, read_only: bool
) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for call in (lambda: nosync.open(path, read_only=read_only), lambda: nosync.ParquetSink(path)):
        with pytest.raises(nosync.InvalidInputError, match=message):
            call()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dangling", "file", "loop"]


def test_a_symlink_that_leads_somewhere_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    nosync.open(tmp_path / "link" / "s").close()
    assert (tmp_path / "there" / "s" / "NOSYNC").exists()


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(nosync.InvalidInputError, match="give an absolute path"):
        nosync.open("s")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EOPNOTSUPP, "with hard links and locks"), (errno.ENOSYS, "with hard links and locks"),
        (errno.EPERM, "must support hard links"), (errno.EMLINK, "a file gets no second name"),
        (errno.EXDEV, "all of a data directory is on one file system"), (errno.ESTALE, "mount it again"),
        (errno.ENAMETOOLONG, "a shorter path"), (errno.ENOSPC, "the disk is full"),
    ],
)  # fmt: skip
def test_a_link_that_is_refused_says_what_to_do(tmp_path: Path, number: int, message: str) -> None:
    """Whoever makes a store, publishes a layer, seals or pins learns what its file system lacks, in that call."""
    env = FaultyEnv()
    env.fail("link", number, times=1)
    with pytest.raises(nosync.StorageError, match=f"{os.strerror(number)}; .*{message}"):
        nosync.open(tmp_path / "s", env=env)
    with nosync.open(tmp_path / "s", env=env, settings=nosync.StoreSettings(background=False)) as store:
        store.append("counts", t=0, rows=words(a=1), key=["word"])
        store.seal(0)
        for call in (
            lambda: store.append("counts", t=1, rows=words(a=2)), lambda: store.seal(1), lambda: store.pin("p", 0)
        ):  # fmt: skip
            env.fail("link", number, times=1)
            with pytest.raises(nosync.StorageError, match=f"cannot .*{os.strerror(number)}; .*{message}"):
                call()
            call()


def test_a_newer_store_format(tmp_path: Path) -> None:
    nosync.open(tmp_path / "s").close()
    marker = tmp_path / "s" / "NOSYNC"
    fields = json.loads(marker.read_text())
    del fields["blake3"]
    marker.write_text(json.dumps(fields | {"nosync_store": 2}))
    with pytest.raises(nosync.FormatVersionError, match="upgrade nosync"):
        nosync.open(tmp_path / "s")
    marker.write_text("{")
    with pytest.raises(nosync.NotAStoreError, match="damaged"):
        nosync.open(tmp_path / "s")


def test_a_second_opener_is_told_who_holds_it(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s"):
        with pytest.raises(nosync.StoreLockedError, match=f"process {os.getpid()}"):
            nosync.open(tmp_path / "s")
        code = "import sys, nosync\ntry: nosync.open(sys.argv[1])\nexcept nosync.StoreLockedError: sys.exit(7)"
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False).returncode == 7
    nosync.open(tmp_path / "s").close()


def test_key_groups_never_change(tmp_path: Path) -> None:
    nosync.open(tmp_path / "s", key_groups=16).close()
    with pytest.raises(nosync.InvalidInputError, match="key_groups=16"):
        nosync.open(tmp_path / "s", key_groups=32)
    nosync.open(tmp_path / "s").close()
    with pytest.raises(nosync.InvalidInputError, match="expected 1 to"):
        nosync.open(tmp_path / "t", key_groups=0)


@pytest.mark.parametrize("retain", [-1, 1.5, "3"])
def test_settings_are_checked(tmp_path: Path, retain: object) -> None:
    with pytest.raises(nosync.InvalidInputError, match="retain"):
        nosync.open(tmp_path / "s", retain=retain)  # type: ignore[arg-type]


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


@pytest.fixture
def in_process(open_store: OpenStore) -> nosync.Store:
    """A store whose merges all run in a process of their own."""
    return filled(open_store, 6, settings=nosync.StoreSettings(background=False, merge_process_rows=0, grace_s=0.0))


def test_merging_in_another_process_gives_the_same_bytes(open_store: OpenStore, in_process: nosync.Store) -> None:
    before = snapshot(in_process)
    in_process.compact()
    other = filled(open_store, 6, name="other")
    other.compact()
    assert [layer.digest for layer in in_process.layers()] == [layer.digest for layer in other.layers()]
    assert len(in_process.layers()) == 1
    assert snapshot(in_process) == before


def test_a_merge_process_that_is_told_to_stop(in_process: nosync.Store) -> None:
    merge, before = merge_of_all(in_process), in_process.layers()
    with MergeProcess() as process:
        assert process.run(merge, lambda: True) is None
        assert process.pid is None
        assert in_process.layers() == before
        assert process.run(merge, lambda: False) is not None


def merge_of_all(store: nosync.Store) -> Merge:
    directory = store.directory
    layers = [directory.reader(id) for id in directory.layer_ids()]
    return Merge(directory.root, layers, since=ZERO, bottom=True, env=directory.env)


def test_one_process_does_many_merges(in_process: nosync.Store) -> None:
    merge = merge_of_all(in_process)
    with MergeProcess() as process:
        first = process.run(merge, lambda: False)
        pid = process.pid
        again = process.run(merge, lambda: False)
        assert process.pid == pid
    assert first is not None
    assert again is not None
    assert again.digest == first.digest
    assert again.existed
    assert not psutil.pid_exists(pid or 0)


@pytest.mark.parametrize("how", ["killed", "idle"])
def test_a_merge_process_that_ended_meanwhile_is_started_again(in_process: nosync.Store, how: str) -> None:
    merge = merge_of_all(in_process)
    with MergeProcess(idle_s=0.05 if how == "idle" else 60.0) as process:
        assert process.run(merge, lambda: False) is not None
        child = psutil.Process(process.pid)
        if how == "killed":
            child.kill()
        # It stays a zombie until its parent looks.
        eventually("it is gone", lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert process.run(merge, lambda: False) is not None
        assert process.pid != child.pid


def test_a_merge_process_that_dies_in_the_middle_is_an_error(in_process: nosync.Store) -> None:
    def stop() -> bool:
        psutil.Process(process.pid).kill()
        return False

    with MergeProcess() as process, pytest.raises(nosync.StorageError, match="died with status -9; it is tried again"):
        process.run(merge_of_all(in_process), stop)


def test_a_merge_process_ends_with_its_store(in_process: nosync.Store) -> None:
    others = psutil.Process().children()
    in_process.compact()
    (child,) = (process for process in psutil.Process().children() if process not in others)
    in_process.close()
    assert not child.is_running()


def test_a_merge_process_is_told_of_the_processor(in_process: nosync.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from nosync.lsm.compaction import worker as merge_process

    monkeypatch.setattr(
        merge_process, "numpy_environment", lambda: {"PYTHONHOME": "/nowhere"}
    )  # where Python cannot start
    with pytest.raises(nosync.StorageError, match="the process that merged .* died"):
        in_process.compact()


def test_a_merge_that_gets_no_processor_begins_again_when_layers_pile_up(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is busy all the time a process that is out of the way gets nowhere."""
    from nosync.lsm.node import compactor

    began, nices, run_it = threading.Event(), [], MergeProcess.run

    def run(
        process: MergeProcess, merge: Merge, stop: Callable[[], bool], *, pause_share: float = 0.0
    ) -> Published | None:
        nices.append(process._nice)
        began.set()
        if not process._nice:
            return run_it(process, merge, stop)
        eventually("it is stopped", stop)
        return None

    monkeypatch.setattr(MergeProcess, "run", run)
    monkeypatch.setattr(compactor, "LOOK_S", 0.01)
    settings = nosync.StoreSettings(background=False, merge_process_rows=0, grace_s=0.0)
    store = filled(open_store, 6, settings=settings)
    store.sync()
    before = snapshot(store)
    merging = threading.Thread(target=store.node.merge_once)  # type: ignore[attr-defined]
    merging.start()
    assert began.wait(10.0)
    for t in range(6, 40):
        store.append("counts", t=t, rows=words(a=t), key=["word"])
        store.seal(t)
    store.sync()
    merging.join(timeout=30.0)
    assert not merging.is_alive()
    assert nices == [OUT_OF_THE_WAY, 0]
    assert len(store.layers()) < 40
    assert snapshot(store)[: len(before)] == before


def test_a_damaged_input_of_a_merge_process_is_quarantined(in_process: nosync.Store) -> None:
    in_process.sync()
    victim = Path(in_process.layers()[2].path)
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    in_process.compact()
    assert [m.t for m in in_process.missing()] == [2]
    assert not victim.exists()
    (gone,) = in_process.verify().errors
    assert "timestamp 2: is gone" in gone, "what is there is whole"


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
