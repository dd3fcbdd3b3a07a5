"""Sinks that did not hear of a rewind or a promotion, because the job gave another output meanwhile: the output says itself
of which line its epochs are, and what the job does not have any more is taken out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

import nosync
from nosync.job.parquet_outputs import DirectoryOutput, Lines
from nosync.lsm.facts.deliveries import DeliveryLog
from tests.conftest import OpenStore
from tests.helpers.s3 import moto
from tests.helpers.sink_runs import COLUMNS, advance, delivery_of, expected, rows_of, run
from tests.helpers.tables import Output


@pytest.fixture(scope="module")
def objects() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, moto(patch) as url:
        yield url


@pytest.fixture(params=["parquet", "parquet-s3", "sqlite", "delta", "iceberg"])
def outputs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Output, Output]:
    server = request.getfixturevalue("objects") if request.param == "parquet-s3" else None
    first, second = (Output(request.param, tmp_path / f"{tmp_path.name}-{name}", server) for name in "ab")
    for output in (first, second):
        output.path.parent.mkdir()
    return first, second


def rewound(store: nosync.Store, to: int, keep_as: str) -> None:
    store.rewind(to, keep_as=keep_as)
    for t in (to + 1, to + 2):
        advance(store, t, rows_of(t + 20))


def test_the_output_that_was_away_has_the_epochs_of_the_job(
    open_store: OpenStore, outputs: tuple[Output, Output]
) -> None:
    first, second = outputs
    store = open_store(retain=1000)
    run(store, first.sink(), 5)
    run(store, second.sink(), 6)
    rewound(store, 2, "one")
    run(store, second.sink(), 7)  # it withdraws, and takes the marks back
    for until in (8, 9):
        run(store, first.sink(), until)
        assert first.rows(*COLUMNS) == expected(store, until - 1)
    rewound(store, 6, "two")
    run(store, second.sink(), 9)
    rewound(store, 7, "three")
    run(store, first.sink(), 12)
    assert first.rows(*COLUMNS) == expected(store, 11)


def test_what_is_the_job_s_is_not_given_again(
    open_store: OpenStore, outputs: tuple[Output, Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = outputs
    store = open_store(retain=1000)
    run(store, first.sink(), 3)
    run(store, second.sink(), 5)
    rewound(store, 2, "one")
    given = []
    deliver = type(first.sink()).deliver
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(first.sink()), "deliver", lambda sink, rows, t, marks: given.append(t) or deliver(sink, rows, t, marks)
        )
        run(store, first.sink(), 6)
    assert given == [3, 4, 5]
    assert first.rows(*COLUMNS) == expected(store, 5)


def test_output_that_an_earlier_version_wrote_goes_on(open_store: OpenStore, tmp_path: Path) -> None:
    """It does not say of which lines its epochs are."""
    output, store = Output("parquet", tmp_path), open_store(retain=1000)
    run(store, output.sink(), 3)
    for path in (output.path / "_nosync_lines").iterdir():
        path.unlink()
    run(store, output.sink(), 5)
    assert sorted(path.name for path in (output.path / "_nosync_lines").iterdir()) == ["3-main"]
    rewound(store, 3, "one")
    run(store, output.sink(), 6)
    assert output.rows(*COLUMNS) == expected(store, 5)


def test_readers_do_not_see_what_the_output_says_of_itself(open_store: OpenStore, tmp_path: Path) -> None:
    output, store = Output("parquet", tmp_path), open_store(retain=1000)
    run(store, output.sink(), 3)
    found = ds.dataset(output.path, partitioning="hive")
    assert found.count_rows() == len(expected(store, 2))
    assert all("epoch=" in path for path in found.files)


def test_lines_of_an_attempt_that_died_say_nothing_of_others(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(retain=1000)
    run(store, Output("parquet", tmp_path / "other").sink(), 3)
    marks: DeliveryLog = delivery_of(store, Output("parquet", tmp_path / "other").sink()).marks("sums")
    output = DirectoryOutput(tmp_path / "out")
    output.note_line(0, "main")
    output.note_line(5, "other")  # it was withdrawn up to 2, and died before the next epoch
    output.note_line(3, "main")
    assert output.lines() == Lines(((0, "main"),))
    assert output.lines().left_after([0, 3, 5], marks) is None
    output.note_line(4, "other")
    assert output.lines().left_after([0, 3, 4, 5], marks) == 3
    assert Lines.named(["x", "2-a", "0-main-1", "-", "01-b"]) == Lines(((0, "main-1"), (2, "a")))
