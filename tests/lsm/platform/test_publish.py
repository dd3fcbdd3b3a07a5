"""Temporary files: those that nobody writes any more go, also while a node runs for months."""

from __future__ import annotations

import time
from pathlib import Path

import nosync
from nosync.lsm.platform.publish import discard_old
from tests.conftest import OpenStore
from tests.helpers.clocks import Clock

HOUR_US = 3600 * 1_000_000


def test_what_a_task_left_that_was_killed_goes_after_a_day(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "a directory").mkdir(parents=True)
    left = tmp_path / "tmp" / "left"
    left.write_bytes(b"half of a layer")
    clock = Clock(time.time_ns() // 1000)
    for hours, is_there in ((0, True), (23, True), (25, False)):
        discard_old(tmp_path, Clock(clock.now_us + hours * HOUR_US))
        assert left.exists() is is_there
    assert (tmp_path / "tmp" / "a directory").exists()


def test_a_node_that_goes_on_does_so(open_store: OpenStore) -> None:
    clock = Clock(time.time_ns() // 1000)
    store = open_store(settings=nosync.StoreSettings(background=False), env=clock)
    left = store.directory.root / "tmp" / "left"
    left.write_bytes(b"half of a layer")
    clock.now_us += 25 * HOUR_US
    for look in (False, True):
        store.node.parts.discovery._next_scan_s = 0.0 if look else float("inf")  # type: ignore[attr-defined]
        store.node.parts.discovery.look()  # type: ignore[attr-defined]
        assert left.exists() is not look
