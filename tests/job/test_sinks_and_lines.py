"""Sinks where the store and what was given part ways: two drivers, a store put back, rewinds to long ago."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from nosync.lsm.facts import deliveries
from tests.helpers.sink_runs import COLUMNS, Frame, advance, delivery_of, expected
from tests.helpers.tables import Output, postgres


def one_row(v: int) -> pa.Table:
    return pa.table({"k": ["a"], "v": pa.array([v], pa.int64())})


# --- two drivers ------------------------------------------------------------------------------------------------------


def test_two_drivers_write_one_epoch_into_a_directory(tmp_path: Path) -> None:
    """The one that was replaced is paused between writing and naming what it wrote, and the other has written a half."""
    rows = pa.table({"k": [f"k{i}" for i in range(10)], "v": pa.array(range(10), pa.int64())})
    wrote, half, go_on, other_goes_on = (threading.Event() for _ in range(4))

    class Replaced(Frame):
        def parquet(self, path: str) -> None:
            super().parquet(path)
            wrote.set()
            assert go_on.wait(30)

    class GoesOn(Frame):
        def parquet(self, path: str) -> None:
            Path(path).mkdir(parents=True)
            pq.write_table(self._rows.slice(0, 5), f"{path}/part-00000.parquet")
            half.set()
            assert other_goes_on.wait(30)
            pq.write_table(self._rows.slice(5), f"{path}/part-00001.parquet")

    with nosync.open(tmp_path / "store", retain=100) as store:
        first, second = (delivery_of(store, nosync.ParquetSink(tmp_path / "out")) for _ in range(2))
        first._changes = lambda *of: Replaced(store.changes(*of))  # type: ignore[assignment,return-value]
        second._changes = lambda *of: GoesOn(store.changes(*of))  # type: ignore[assignment,return-value]
        advance(store, 0, rows)
        threads = [threading.Thread(target=one.deliver, args=(0,)) for one in (first, second)]
        threads[0].start()
        assert wrote.wait(30)
        threads[1].start()
        assert half.wait(30)
        go_on.set()
        threads[0].join()
        other_goes_on.set()
        threads[1].join()
        found = pq.read_table(tmp_path / "out/epoch=0", partitioning=None)
        assert sorted(found["k"].to_pylist()) == sorted(rows["k"].to_pylist())
        assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".staged")]
        (tmp_path / "out/.staged-0-of-an-attempt-that-died").mkdir()
        advance(store, 1, rows)
        delivery_of(store, nosync.ParquetSink(tmp_path / "out"))
        assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".staged")]


# --- a store that was put back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "delta", "parquet"])
def test_a_store_that_was_put_back_from_before_a_rewind(tmp_path: Path, kind: str) -> None:
    """The table has epochs of a line that the store does not know: it is not said to be right. Parquet knows its lines."""
    output = Output(kind, tmp_path)
    root = tmp_path / "store"
    with nosync.open(root, retain=100) as store:
        delivery = delivery_of(store, output.sink())
        for t in range(6):
            advance(store, t, one_row(1))
            delivery.deliver(t)
    shutil.copytree(root, tmp_path / "before")
    with nosync.open(root, retain=100) as store:
        store.rewind(2, keep_as="old")
        delivery = delivery_of(store, output.sink())
        for t in range(3, 9):
            advance(store, t, one_row(100))
            delivery.deliver(t)
    shutil.rmtree(root)
    shutil.copytree(tmp_path / "before", root)
    with nosync.open(root, retain=100) as store:
        if kind == "parquet":
            delivery_of(store, output.sink())
            assert output.rows(*COLUMNS) == expected(store, 5)
            return
        was = output.rows(*COLUMNS)
        for _ in range(2):
            with pytest.raises(nosync.StorageError, match="up to 8, the last of a line that this store does not know"):
                delivery_of(store, output.sink())
        assert output.rows(*COLUMNS) == was, "nothing of it is lost"


# --- rewinds to long ago ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["gap", "at_least_once"])
@pytest.mark.parametrize("begins", [0, 30])
def test_a_rewind_to_before_the_oldest_mark_gives_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarantee: str, begins: int
) -> None:
    monkeypatch.setattr(deliveries, "_KEPT_EPOCHS", 20)
    given: list[int] = []
    sink = nosync.CallbackSink(lambda _, t: given.append(t), guarantee)
    with nosync.open(tmp_path / "store", retain=1000) as store:
        delivery: Any = None
        for t in range(60):
            if t == begins:
                delivery = delivery_of(store, sink)
            advance(store, t, one_row(t))
            if delivery is not None:
                delivery.deliver(t)
    assert given == list(range(begins, 60))
    with nosync.open(tmp_path / "store", retain=1000) as store:  # where marks of long ago are removed
        store.rewind(10, keep_as="before")
        given.clear()
        delivery = delivery_of(store, sink)
        assert given == []
        advance(store, 11, one_row(1))
        delivery.deliver(11)
        assert given == [11]


def test_a_promotion_gives_nothing_from_before_a_sink_began(tmp_path: Path) -> None:
    output = Output("sqlite", tmp_path)
    with nosync.open(tmp_path / "store", retain=100) as store:
        for t in range(3):
            advance(store, t, one_row(1))
        store.rewind(0, keep_as="fix")  # the line of before goes on as a branch
        for t in range(1, 3):
            advance(store, t, one_row(5))
        delivery = delivery_of(store, output.sink())
        advance(store, 3, one_row(5))
        delivery.deliver(3)
        pending = delivery.schedule_redelivery("fix", 0)
        assert pending
        delivery_of(store, output.sink())
        assert {row[0] for row in output.rows(*COLUMNS)} == {3}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p%ct", ":bind", "%(x)s", "with:colon"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_column_of_any_name_is_added(tmp_path: Path, kind: str, name: str) -> None:
    with contextlib.ExitStack() as held:
        output = Output(kind, tmp_path, held.enter_context(postgres()) if kind == "postgres" else None)
        store = held.enter_context(nosync.open(tmp_path / "store"))
        marks = delivery_of(store, output.sink()).marks("sums")
        for t, columns in enumerate([{"k": ["a"]}, {"k": ["a"], name: [7]}]):
            rows = pa.table({**columns, "_change_type": ["insert"], "_epoch": [t]})
            output.sink().deliver(lambda rows=rows: Frame(rows), t, marks)  # type: ignore[misc]
        assert sorted(output.rows("_epoch", name), key=repr) == [(0, None), (1, 7)]


def test_names_that_are_too_long_for_a_database(tmp_path: Path) -> None:
    with postgres() as url, nosync.open(tmp_path / "store") as store:
        marks = delivery_of(store, nosync.SqlSink(url, "t" * 63)).marks("sums")
        rows = pa.table({"k": ["a"], "_change_type": ["insert"], "_epoch": [0]})
        nosync.SqlSink(url, "t" * 63).deliver(lambda: Frame(rows), 0, marks)  # type: ignore[arg-type,return-value]
        long = rows.append_column("c" * 64, pa.array([1]))
        with pytest.raises(nosync.SchemaError, match="a name has at most 63 bytes in this database"):
            nosync.SqlSink(url, "u").deliver(lambda: Frame(long), 0, marks)  # type: ignore[arg-type,return-value]
