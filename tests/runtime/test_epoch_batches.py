"""Which epochs share a Spark job, and how a task takes them one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from nosync.flow.bound_flow import Step
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.model.history import Span, continued, view_at
from nosync.lsm.model.layer import Shard, TraceId
from nosync.lsm.model.timestamp import pack
from nosync.runtime.epoch_batches import MOST_EPOCHS, MOST_ROWS, ScheduledEpoch, batch_epochs, run_epochs_of_shard


def flow(bootstrap_at: int | None = None, **loops: int) -> Any:
    return SimpleNamespace(loops=loops, bootstraps_at=lambda t: t == bootstrap_at)


FLOW = flow()


def again(
    t: int, of: Any = FLOW, shards: int = 2, rows: int = 10, skip: str = "", needs: str = "", **more: Any
) -> ScheduledEpoch:
    return ScheduledEpoch(Step(t, {}, frozenset(needs)), of, shards, rows, frozenset(skip), **more)


def times(epochs: list[ScheduledEpoch]) -> list[list[int]]:
    return [[one.step.t for one in batch] for batch in batch_epochs(epochs)]


def test_epochs_of_one_flow_share_a_job() -> None:
    assert times([again(t) for t in (1, 2, 5)]) == [[1, 2, 5]]
    assert times([]) == []


def test_epochs_of_different_kinds_do_not() -> None:
    assert times([again(1), again(2, shards=3), again(3, shards=3)]) == [[1], [2, 3]]
    assert times([again(1), again(2, skip="a"), again(3, skip="a")]) == [[1], [2, 3]]
    assert times([again(1), again(2, of=flow())]) == [[1], [2]], "other sources, or placed by another key"
    assert times([again(1), again(2, needs="a"), again(3)]) == [[1], [2], [3]], "whose rows are given again"
    assert times([again(1, is_retained=False), again(2, is_retained=False), again(3)]) == [[1], [2], [3]]
    loops = flow(reached=1)
    assert times([again(1, of=loops), again(2, of=loops)]) == [[1], [2]]
    begins = flow(bootstrap_at=2)
    assert times([again(t, of=begins) for t in range(1, 5)]) == [[1], [2], [3, 4]]


def test_a_job_takes_neither_too_many_epochs_nor_too_many_rows() -> None:
    assert [len(batch) for batch in times([again(t) for t in range(2 * MOST_EPOCHS + 1)])] == [MOST_EPOCHS] * 2 + [1]
    assert times([again(t, rows=MOST_ROWS // 2) for t in range(5)]) == [[0, 1], [2, 3], [4]]
    assert times([again(t, rows=2 * MOST_ROWS) for t in range(2)]) == [[0], [1]], "an epoch is not cut"


@dataclass
class Task:
    """Stands for the work of a segment."""

    t: int
    got: list[tuple[int, list[int]]]
    edges: tuple[str, ...] = ("feed",)
    input_given: bool = False
    output: str | None = "stage"
    schema: pa.Schema = field(default_factory=lambda: pa.schema([("n", pa.int64())]))


def run_shard(task: Task, index: int, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stands for what a shard does."""
    mine = [n for batch in rows for n in batch.column("n").to_pylist()]
    task.got.append((task.t, mine))
    yield pa.RecordBatch.from_pydict({"n": [10 * n for n in mine]}, task.schema)


def given(*of: tuple[int, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": [n for _, n in of], EPOCH_COLUMN: [t for t, _ in of]})


def run(tasks: list[Task], *rows: pa.RecordBatch) -> list[dict[str, Any]]:
    with mock.patch("nosync.runtime.epoch_batches.run_shard", run_shard):
        return [row for batch in run_epochs_of_shard(tasks, 0, iter(rows)) for row in batch.to_pylist()]  # type: ignore[arg-type]


def test_each_epoch_gets_its_rows_and_marks_what_it_emits() -> None:
    got: list[tuple[int, list[int]]] = []
    rows = run(
        [Task(t, got) for t in (3, 4, 5, 7)], given((3, 1), (3, 2), (5, 3)), given((5, 4)), given(), given((7, 5))
    )
    assert got == [(3, [1, 2]), (4, []), (5, [3, 4]), (7, [5])]
    assert rows == [{EPOCH_COLUMN: t, "n": n} for t, n in ((3, 10), (3, 20), (5, 30), (5, 40), (7, 50))]


def test_reports_are_emitted_as_they_are() -> None:
    assert run([Task(t, [], output=None) for t in (1, 2)], given((1, 1), (2, 2))) == [{"n": 10}, {"n": 20}]


def test_tasks_without_feeds_look_at_no_rows_but_those_of_sources() -> None:
    got: list[tuple[int, list[int]]] = []
    blank = pa.RecordBatch.from_pydict({"shard": [0]})
    run([Task(t, got, edges=()) for t in (1, 2)], blank)
    assert got == [(1, []), (2, [])]
    run([Task(t, got, edges=(), input_given=True) for t in (3, 4)], given((3, 1), (4, 2)))
    assert got[2:] == [(3, [1]), (4, [2])], "a source has none, and its rows are given"


@pytest.mark.parametrize("rows", [given((2, 1), (1, 2)), given((9, 1)), given((1, 1), (2, 2), (1, 3))])
def test_rows_out_of_order_are_never_left_out(rows: pa.RecordBatch) -> None:
    with pytest.raises(AssertionError, match="came, which is not the next of"):
        run([Task(t, []) for t in (1, 2)], rows)


def test_a_history_goes_on_before_anything_is_sealed() -> None:
    old = Span("f0", 2, pack(0))
    id = TraceId("s", "f1", Shard(1, 2))
    begun = continued((old,), "f1", 2, pack(4))
    assert begun == (Span("f0", 2, pack(0), pack(4)), Span("f1", 2, pack(4)))
    assert continued(begun, "f1", 2, pack(5)) == begun, "it is there"
    assert continued((), "f1", 2, pack(4)) == (Span("f1", 2, pack(4)),)
    first, second = view_at(begun, id, pack(4), 128), view_at(begun, id, pack(5), 128)
    assert first == view_at((old,), id, pack(4), 128), "as where it runs alone"
    assert first == second
    later = (Span("f0", 2, pack(0), pack(4)), Span("f0", 3, pack(4)))
    assert continued(later, "f0", 2, pack(1)) == later, "an epoch that was sealed with other shards than the last"
