"""Temporary files: those that nobody writes any more go, also while a node runs for months."""

from __future__ import annotations

import os
from pathlib import Path

import nosync
from nosync.lsm.platform.publish import discard_old
from tests.conftest import OpenStore
from tests.helpers.clocks import Clock

DAY_S = 24 * 3600


def written(path: Path, at_s: int) -> Path:
    path.write_bytes(b"half of a layer")
    os.utime(path, (at_s, at_s))
    return path


def test_what_a_task_left_that_was_killed_goes_after_a_day(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    clock = Clock(10 * DAY_S * 1_000_000)
    old, new = written(tmp_path / "tmp/old", 9 * DAY_S - 1), written(tmp_path / "tmp/new", 9 * DAY_S + 1)
    discard_old(tmp_path, clock)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_node_that_goes_on_does_so(open_store: OpenStore) -> None:
    store = open_store(settings=nosync.StoreSettings(background=False))
    left = written(store.directory.root / "tmp/left", 1)
    for look in (False, True):
        store.node.parts.discovery._next_scan_s = 0.0 if look else float("inf")  # type: ignore[attr-defined]
        store.node.parts.discovery.look()  # type: ignore[attr-defined]
        assert left.exists() is not look
