"""What tests of Spark's side share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nosync.testing.daemon_cluster import eventually


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each run of an epoch that may scan, whether its tasks were to read the files."""
    from nosync.spark import epoch_run as epoch

    found: list[bool] = []
    decide = epoch.files_to_scan

    def spied(*about: Any) -> Any:
        files = decide(*about)
        found.append(bool(files))
        return files

    monkeypatch.setattr(epoch, "files_to_scan", spied)
    return found


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """The segments behind sources whose tasks were to read files themselves, of each part of an epoch whose files tasks read."""
    from nosync.runtime import epoch_plan

    found: list[frozenset[str]] = []
    decide = epoch_plan.scanned_segments

    def spied(*about: Any) -> frozenset[str]:
        found.append(decide(*about))
        return found[-1]

    monkeypatch.setattr(epoch_plan, "scanned_segments", spied)
    return found


@pytest.fixture
def in_driver(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that the driver begins to run by itself."""
    from nosync.spark import driver_epochs as epoch

    found: list[int] = []
    run = epoch.run_epoch

    def spied(flow: Any, plan: Any, *rest: Any) -> Any:
        found.append(plan.t)
        return run(flow, plan, *rest)

    monkeypatch.setattr(epoch, "run_epoch", spied)
    return found


@pytest.fixture
def workers_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The epochs of tasks that worker processes are asked for. They start with the first epoch, which waits for them."""
    from nosync.runtime import shard_workers
    from nosync.spark import driver_epochs

    found: list[int] = []
    lend, ask = shard_workers.workers_of_process, shard_workers._Worker.ask

    @contextmanager
    def ready(count: int) -> Iterator[Any]:
        with lend(count) as run_task:
            workers = shard_workers._of_process.workers._workers
            eventually("they are ready", lambda: all(worker.is_ready() for worker in workers))
            yield run_task

    def spied(worker: Any, task: Any, *rest: Any) -> bool:
        found.append(task.t)
        return ask(worker, task, *rest)

    monkeypatch.setattr(driver_epochs, "_WORTH_EPOCHS", 0)
    monkeypatch.setattr(driver_epochs, "workers_of_process", ready)
    monkeypatch.setattr(shard_workers._Worker, "ask", spied)
    yield found
    shard_workers._of_process.workers.close()
