"""Merging in a process of its own: the same bytes, and nothing lost when it dies, waits, or reads what is damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import nosync
from nosync.lsm.compaction.merge import Merge
from nosync.lsm.compaction.worker import OUT_OF_THE_WAY, MergeProcess
from nosync.lsm.layers.writer import Published
from nosync.lsm.model.timestamp import ZERO
from nosync.testing.daemon_cluster import eventually
from tests.conftest import OpenStore
from tests.helpers.stores import filled, snapshot, words


@pytest.fixture
def in_process(open_store: OpenStore) -> nosync.Store:
    """A store whose merges all run in a process of their own."""
    return filled(open_store, 6, settings=nosync.StoreSettings(background=False, merge_process_rows=0, grace_s=0.0))


def test_merging_in_another_process_gives_the_same_bytes(open_store: OpenStore, in_process: nosync.Store) -> None:
    before = snapshot(in_process)
    in_process.compact()
    other = filled(open_store, 6, name="other")
    other.compact()
    assert [layer.digest for layer in in_process.layers()] == [layer.digest for layer in other.layers()]
    assert len(in_process.layers()) == 1
    assert snapshot(in_process) == before


def test_a_merge_process_that_is_told_to_stop(in_process: nosync.Store) -> None:
    merge, before = merge_of_all(in_process), in_process.layers()
    with MergeProcess() as process:
        assert process.run(merge, lambda: True) is None
        assert process.pid is None
        assert in_process.layers() == before
        assert process.run(merge, lambda: False) is not None


def merge_of_all(store: nosync.Store) -> Merge:
    directory = store.directory
    layers = [directory.reader(id) for id in directory.layer_ids()]
    return Merge(directory.root, layers, since=ZERO, bottom=True, env=directory.env)


def test_one_process_does_many_merges(in_process: nosync.Store) -> None:
    merge = merge_of_all(in_process)
    with MergeProcess() as process:
        first = process.run(merge, lambda: False)
        pid = process.pid
        again = process.run(merge, lambda: False)
        assert process.pid == pid
    assert first is not None
    assert again is not None
    assert again.digest == first.digest
    assert again.existed
    assert not psutil.pid_exists(pid or 0)


@pytest.mark.parametrize("how", ["killed", "idle"])
def test_a_merge_process_that_ended_meanwhile_is_started_again(in_process: nosync.Store, how: str) -> None:
    merge = merge_of_all(in_process)
    with MergeProcess(idle_s=0.05 if how == "idle" else 60.0) as process:
        assert process.run(merge, lambda: False) is not None
        child = psutil.Process(process.pid)
        if how == "killed":
            child.kill()
        # It stays a zombie until its parent looks.
        eventually("it is gone", lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert process.run(merge, lambda: False) is not None
        assert process.pid != child.pid


def test_a_merge_process_that_dies_in_the_middle_is_an_error(in_process: nosync.Store) -> None:
    def stop() -> bool:
        psutil.Process(process.pid).kill()
        return False

    with MergeProcess() as process, pytest.raises(nosync.StorageError, match="died with status -9; it is tried again"):
        process.run(merge_of_all(in_process), stop)


def test_a_merge_process_ends_with_its_store(in_process: nosync.Store) -> None:
    others = psutil.Process().children()
    in_process.compact()
    (child,) = (process for process in psutil.Process().children() if process not in others)
    in_process.close()
    assert not child.is_running()


def test_a_merge_process_is_told_of_the_processor(in_process: nosync.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from nosync.lsm.platform import child

    monkeypatch.setattr(child, "numpy_environment", lambda: {"PYTHONHOME": "/nowhere"})  # where Python cannot start
    with pytest.raises(nosync.StorageError, match="the process that merged .* died"):
        in_process.compact()


def test_a_merge_that_gets_no_processor_begins_again_when_layers_pile_up(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is busy all the time a process that is out of the way gets nowhere."""
    from nosync.lsm.node import compactor

    began, nices, run_it = threading.Event(), [], MergeProcess.run

    def run(
        process: MergeProcess, merge: Merge, stop: Callable[[], bool], *, pause_share: float = 0.0
    ) -> Published | None:
        nices.append(process._nice)
        began.set()
        if not process._nice:
            return run_it(process, merge, stop)
        eventually("it is stopped", stop)
        return None

    monkeypatch.setattr(MergeProcess, "run", run)
    monkeypatch.setattr(compactor, "LOOK_S", 0.01)
    settings = nosync.StoreSettings(background=False, merge_process_rows=0, grace_s=0.0)
    store = filled(open_store, 6, settings=settings)
    store.sync()
    before = snapshot(store)
    merging = threading.Thread(target=store.node.merge_once)  # type: ignore[attr-defined]
    merging.start()
    assert began.wait(10.0)
    for t in range(6, 40):
        store.append("counts", t=t, rows=words(a=t), key=["word"])
        store.seal(t)
    store.sync()
    merging.join(timeout=30.0)
    assert not merging.is_alive()
    assert nices == [OUT_OF_THE_WAY, 0]
    assert len(store.layers()) < 40
    assert snapshot(store)[: len(before)] == before


def test_a_damaged_input_of_a_merge_process_is_quarantined(in_process: nosync.Store) -> None:
    in_process.sync()
    victim = Path(in_process.layers()[2].path)
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    in_process.compact()
    assert [m.t for m in in_process.missing()] == [2]
    assert not victim.exists()
    (gone,) = in_process.verify().errors
    assert "timestamp 2: is gone" in gone, "what is there is whole"
