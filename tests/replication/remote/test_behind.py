"""Copies that are behind a store which merges: the epoch that is said to be remotely safe can be read, whenever they stop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import nosync
from nosync.lsm.model.timestamp import END_OF_TIME
from nosync.replication.remote import uploader as module
from nosync.replication.remote.bucket import UnavailableError
from nosync.replication.remote.copying import copy_directory
from nosync.replication.remote.restore import restore
from nosync.replication.remote.settings import RemoteSettings
from nosync.testing.simulated_bucket import Objects, SimulatedBucket
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, Copies, epochs, rows_of

STAGES = ("aa", "bb", "cc")
BEFORE, AFTER = 6, 24
"""Epochs that are copied, and those that are sealed while the bucket is away, all but the last two merged."""


@pytest.fixture
def truth() -> dict[int, dict[str, dict[str, int]]]:
    return {}


def sealed(store: nosync.Store, numbers: range, truth: dict[int, dict[str, dict[str, int]]]) -> None:
    for t in numbers:
        epochs(store, range(t, t + 1), stages=STAGES)
        truth[t] = {stage: rows_of(store, stage) for stage in STAGES}


def check_restored(
    objects: Objects, target: Path, truth: dict[int, dict[str, dict[str, int]]], at_least: int | None
) -> None:
    """What is in the bucket now can be restored, and has the rows of its last epoch, which is not before `at_least`."""
    report = restore(SimulatedBucket(Objects(by_name=dict(objects.by_name))), target)
    assert report.epoch is not None
    assert report.problems == ()
    assert at_least is None or report.epoch >= at_least
    with nosync.open(target, read_only=True) as restored:
        assert {stage: rows_of(restored, stage) for stage in STAGES} == truth[report.epoch]
    shutil.rmtree(target)


@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("then", ["goes on", "starts again"])
def test_a_host_that_is_lost_while_its_copies_catch_up(
    open_store: OpenStore, tmp_path: Path, truth: dict[int, dict[str, dict[str, int]]], then: str, retain: int
) -> None:
    objects = Objects()
    store = open_store(settings=QUIET, retain=retain)
    sealed(store, range(BEFORE), truth)
    small = {"flush_bytes": 600, "large_bytes": 1 << 19}
    copies = Copies(store, SimulatedBucket(objects), **small)
    copies.push()
    sealed(store, range(BEFORE, AFTER), truth)
    store.compact()
    store.sync()
    said = packs = 0
    for _ in range(200):
        if then == "starts again":
            copies = Copies(store, SimulatedBucket(objects), **small)
            uploader = copies.level._uploader = copies.level._begin()
        else:
            assert copies.level._uploader is not None
            uploader = copies.level._uploader
        uploader.look_at_all()
        uploader.gather()
        if not uploader.has_something:
            break
        uploader.flush()
        packs += 1
        said = max(said, copies.level.status().safe_point or 0)
        check_restored(objects, tmp_path / "restored", truth, said)
    assert packs > 5
    assert said == AFTER - 1


def test_a_backup_that_is_interrupted_leaves_the_one_before(
    open_store: OpenStore, tmp_path: Path, truth: dict[int, dict[str, dict[str, int]]]
) -> None:
    objects, puts, most = Objects(), 0, 0

    def away(call: str, name: str) -> str:
        nonlocal puts
        puts += call == "put"
        return "before" if call == "put" and puts > most else ""

    settings = RemoteSettings("memory://test", flush_bytes=600, large_bytes=1 << 19)
    with open_store(settings=QUIET, retain=2) as store:
        sealed(store, range(BEFORE), truth)
    copy_directory(store.directory.root, SimulatedBucket(objects), settings)
    with open_store(settings=QUIET, retain=2) as store:
        sealed(store, range(BEFORE, AFTER), truth)
        store.compact()
    for tried in range(2, 60):
        most = tried
        puts, there = 0, Objects(by_name=dict(objects.by_name))
        try:
            copy_directory(store.directory.root, SimulatedBucket(there, away), settings)
        except UnavailableError:
            check_restored(there, tmp_path / "restored", truth, BEFORE - 1)
            continue
        check_restored(there, tmp_path / "restored", truth, AFTER - 1)
        break
    assert most > 6


def test_one_of_two_nodes_whose_copies_stop(
    open_store: OpenStore, tmp_path: Path, truth: dict[int, dict[str, dict[str, int]]]
) -> None:
    """Each keeps one stage. The other one goes on, and merges."""
    objects = Objects()
    first = open_store("one", settings=QUIET, retain=2)
    sealed(first, range(BEFORE), truth)
    shutil.copytree(first.directory.root, tmp_path / "two")
    second = open_store("two", settings=QUIET, retain=2)
    nodes = [Copies(store, SimulatedBucket(objects), name) for store, name in ((first, "n1"), (second, "n2"))]
    for node, mine in zip(nodes, ({"aa"}, {"bb", "cc"}), strict=True):
        source, all_layers = node.level._source, node.level._source.layers
        source.layers = lambda all_layers=all_layers, mine=mine: [  # type: ignore[method-assign]
            one for one in all_layers() if one.id.trace.stage in mine
        ]
        source.is_for_another = lambda one, mine=mine: one.id.trace.stage not in mine  # type: ignore[method-assign]
    for node in (*nodes, nodes[0]):
        node.push()
    for t in range(BEFORE, AFTER):
        for store in (first, second):
            sealed(store, range(t, t + 1), truth)
        first.compact()
        first.sync()
        nodes[0].push()
        check_restored(objects, tmp_path / "restored", truth, BEFORE - 1)
    for node in (nodes[1], nodes[0], nodes[1]):
        node.push()
    check_restored(objects, tmp_path / "restored", truth, AFTER - 1)


def test_what_an_earlier_version_dropped_is_told(
    open_store: OpenStore, tmp_path: Path, truth: dict[int, dict[str, dict[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects()
    store = open_store(settings=QUIET, retain=2)
    sealed(store, range(BEFORE), truth)
    Copies(store, SimulatedBucket(objects)).push()
    sealed(store, range(BEFORE, AFTER), truth)
    store.compact()
    store.sync()
    monkeypatch.setattr(module, "exact_from", lambda *_: END_OF_TIME)
    copies = Copies(store, SimulatedBucket(objects), flush_bytes=300)
    uploader = copies.flush_once()
    for _ in range(50):
        uploader.look_at_all()
        uploader.gather()
        has_dropped = bool(uploader._dropped)
        uploader.flush()
        if has_dropped:
            break
    report = restore(SimulatedBucket(objects), tmp_path / "restored")
    assert report.epoch == BEFORE - 1
    (problem,) = report.problems
    assert "stage aa" in problem
    assert "cannot be read as of epoch 5 of branch main" in problem
    with nosync.open(tmp_path / "restored", read_only=True) as restored, pytest.raises(nosync.CompactedError):
        restored.read("aa")
