"""What tests of Spark's side share."""

from __future__ import annotations

from typing import Any

import pytest


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

    def spied(flow: Any, plan: Any, inputs: Any) -> Any:
        found.append(plan.t)
        return run(flow, plan, inputs)

    monkeypatch.setattr(epoch, "run_epoch", spied)
    return found
