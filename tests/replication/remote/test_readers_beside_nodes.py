"""Who reads a bucket while several nodes go on: what is said to be whole is there, though logs are read one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.replication.remote.bucket import ObjectInfo
from nosync.replication.remote.bucket_store import connect_bucket
from nosync.replication.remote.restore import restore
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, rows_of

STAGES = ("aa", "bb")
"""The first node puts the layers of the one, and the second those of the other."""


class GoesOn(SimulatedBucket):
    """Nodes go on when the log of the second one is read, after that of the first."""

    def __init__(self, objects: Objects, go_on: Callable[[], None]) -> None:
        super().__init__(objects)
        self._go_on: Callable[[], None] | None = go_on
        self.is_armed = True

    def list(self, prefix: str) -> list[ObjectInfo]:
        if prefix.startswith("nodes/n2/") and self._go_on is not None and self.is_armed:
            go_on, self._go_on = self._go_on, None
            go_on()
        return super().list(prefix)


class Two:
    """Two nodes with the same epochs."""

    def __init__(self, open_store: OpenStore, root: Path) -> None:
        with open_store("s1", settings=QUIET) as first:
            for t in range(5):
                self._add(first, t)
                first.seal(t)
        shutil.copytree(root / "s1", root / "s2")
        self.objects, bucket = Objects(), SimulatedBucket
        self._stores = [open_store(name, settings=QUIET) for name in ("s1", "s2")]
        self._copies = [Copies(store, bucket(self.objects), f"n{i}") for i, store in enumerate(self._stores, 1)]
        for copies, other in zip(self._copies, reversed(STAGES), strict=True):
            source = copies.level._source
            source.is_for_another = lambda one, other=other: one.id.trace.stage == other  # type: ignore[method-assign]
        for copies in (*self._copies, self._copies[0]):
            copies.push()

    @staticmethod
    def _add(store: nosync.Store, t: int) -> None:
        for stage in STAGES:
            store.append(stage, t=t, rows=pa.table({"k": [f"a{t}", "all"], "n": [t, t]}), key=["k"])

    def go_on(self) -> None:
        """The first node puts what it has before the newest epoch is sealed, and the second one all of it."""
        for store in self._stores:
            for t in (5, 6):
                self._add(store, t)
                store.seal(t)
            self._add(store, 7)
            store.sync()
        self._copies[0].step()
        for store in self._stores:
            store.seal(7)
            store.sync()
        self._copies[1].step()


@pytest.mark.parametrize("how", ["restore", "connect", "connect, and again"])
def test_what_is_said_to_be_whole_is_there(open_store: OpenStore, tmp_path: Path, how: str) -> None:
    two = Two(open_store, tmp_path)
    bucket = GoesOn(two.objects, two.go_on)
    if how == "restore":
        assert restore(bucket, tmp_path / "restored").epoch == 7
        return
    bucket.is_armed = how == "connect"
    with connect_bucket(bucket, None) as store:
        assert rows_of(store, "aa")["all"] == (7 if bucket.is_armed else 4)
        bucket.is_armed, store.env._looked_s = True, float("-inf")  # type: ignore[attr-defined]
        assert store.last_sealed() == store.safe_point() == 7
        assert {stage: rows_of(store, stage)["all"] for stage in STAGES} == dict.fromkeys(STAGES, 7)
