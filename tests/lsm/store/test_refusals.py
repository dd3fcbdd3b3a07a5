"""What a store refuses, in the call where the mistake is, and without losing anything."""

from __future__ import annotations

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.manifests.branches import ChangedStages
from tests.conftest import OpenStore
from tests.helpers.stores import filled, keys, snapshot, words


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
        (lambda s: (s.pin("x", 2), s.rewind(1)), nosync.InvalidInputError, "cannot rewind to 1: pin 'x' holds epoch 2"),
        (
            lambda s: (
                s.pin("x", 2),
                s.node.create_branch("b", "main", 1, ChangedStages(("counts",))),
                s.node.promote("b", None),
            ),
            nosync.InvalidInputError,
            "cannot promote b: pin 'x' holds epoch 2",
        ),
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


def values_that_are_not_of_their_type() -> dict[str, pa.Array]:
    wide = pa.array([1, 10**9], pa.decimal128(20, 0))
    return {
        "Text is UTF-8": pa.array([b"ok", b"\xff\xfe"]).view(pa.string()),
        "does not fit in precision": pa.Array.from_buffers(pa.decimal128(5, 0), 2, wide.buffers()),
        "is not within the acceptable range": pa.array([0, 90_000], pa.int32()).view(pa.time32("s")),
        "a whole number of days": pa.array([0, 1], pa.int64()).view(pa.date64()),
    }


@pytest.mark.parametrize("message", values_that_are_not_of_their_type())
@pytest.mark.parametrize("is_nested", [False, True])
def test_values_that_are_not_of_their_type_are_refused_when_they_are_recorded(
    open_store: OpenStore, message: str, is_nested: bool
) -> None:
    """Arrow hands them on, and whoever reads a layer would take it for damaged."""
    store, values = open_store(), values_that_are_not_of_their_type()[message]
    if is_nested:
        values = pa.StructArray.from_arrays([values], ["x"])
    for key in (["k"], []):
        with pytest.raises(nosync.SchemaError, match=f"column 'v' has values that are no .*{message}"):
            store.append("c", t=0, rows=pa.table({"k": [0, 1], "v": values}), key=key)
    if not is_nested and not pa.types.is_time(values.type):  # which is no key
        with pytest.raises(nosync.SchemaError, match=f"column 'v' has values that are no .*{message}"):
            store.append("c", t=0, rows=pa.table({"v": values}), key=["v"])
    store.append("c", t=0, rows=pa.table({"k": [0]}), key=["k"])
    store.seal(0)
    store.sync()
    assert store.read("c").num_rows == 1
    assert store.safe_point() == 0


def test_a_lost_layer_of_a_sealed_epoch_comes_back_only_as_it_was(open_store: OpenStore) -> None:
    store = filled(open_store)
    store.sync()
    before = snapshot(store)
    manifest = store.manifest(3)
    assert manifest is not None
    store.directory.path_of(manifest.entries[0].id).unlink()
    store.close()
    store = open_store()
    with pytest.raises(nosync.DeterminismError, match="the sealed epoch lists"):
        store.append("counts", t=3, rows=words(a=3, w3=7))
    assert len(store.missing()) == 1
    store.append("counts", t=3, rows=words(a=3, w3=1))
    store.sync()
    assert (store.missing(), store.safe_point(), snapshot(store)) == ([], 3, before)


def test_a_first_attempt_that_was_rewound_may_have_had_other_columns(open_store: OpenStore) -> None:
    store = open_store()
    store.append("c", t=0, rows=pa.table({"k": [1], "v": ["text"]}), key=["k"])
    for rows, key in ((pa.table({"k": [1], "v": [1.5]}), ["k"]), (pa.table({"k": [1], "v": ["x"]}), ["v"])):
        store.rewind(-1)
        store.append("c", t=0, rows=rows, key=key)
    store.seal(0)
    assert store.read("c").to_pylist() == [{"v": "x", "k": 1}]
