"""A data directory that was moved away, replaced or unmounted while it is open: nothing is acknowledged, and nothing
lost.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.node.node import Node
from nosync.testing.daemon_cluster import eventually, running

REFUSED = "was moved or replaced, or its file system was unmounted"


def append(store: nosync.Store, t: int) -> None:
    store.append("c", t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
    store.seal(t)


@contextmanager
def moved(root: Path) -> Iterator[None]:
    away = root.with_name("away")
    root.rename(away)
    try:
        yield
    finally:
        away.rename(root)


@contextmanager
def replaced_by_a_copy(root: Path) -> Iterator[None]:
    """As where somebody makes room: everything that a scan would look for is there."""
    away = root.with_name("away")
    root.rename(away)
    shutil.copytree(away, root, ignore=shutil.ignore_patterns("LOCK", "catalog"))
    try:
        yield
    finally:
        shutil.rmtree(root)
        away.rename(root)


@contextmanager
def replaced_by_an_empty_one(root: Path) -> Iterator[None]:
    away = root.with_name("away")
    root.rename(away)
    root.mkdir()
    try:
        yield
        assert not list(root.iterdir()), "nothing was made there"
    finally:
        shutil.rmtree(root)
        away.rename(root)


@contextmanager
def covered_by_a_mount(root: Path) -> Iterator[None]:
    """What a mount that went away looks like from here: another directory."""
    made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(root)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root may mount a file system; the directory that is replaced covers the code")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


WAYS = [moved, replaced_by_a_copy, replaced_by_an_empty_one, covered_by_a_mount]


@pytest.mark.parametrize("gone", WAYS)
@pytest.mark.parametrize("background", [True, False])
def test_nothing_is_acknowledged_where_the_directory_is_another_one(
    tmp_path: Path, gone: Callable[[Path], Iterator[None]], *, background: bool
) -> None:
    """And nothing that was is taken for lost; when it is back, all goes on."""
    root = tmp_path / "s"
    settings = nosync.StoreSettings(background=background, scan_interval_s=0.01, retry_s=0.01)
    with nosync.open(root, settings=settings) as store:
        node = store.node
        assert isinstance(node, Node)
        for t in range(3):
            append(store, t)
        store.sync()
        append(store, 3)
        recorded = node.durable_ids()
        with gone(root):  # type: ignore[attr-defined]
            for call in (
                store.sync,
                store.node.make_durable_now,
                store.node.check,
                lambda: store.seal(3),
                store.compact,
            ):
                with pytest.raises(nosync.StorageError, match=REFUSED):
                    call()
            with pytest.raises(nosync.StorageError, match=REFUSED):
                node.collect_garbage()
            with pytest.raises(nosync.StorageError, match=REFUSED):
                node.make_files_ahead()
            assert not node.merge_once()
            found = store.status()
            assert REFUSED in found.problems["the data directory"]
            assert found.missing is None
            assert found.safe_point == store.safe_point() in (2, 3), "what was acknowledged is"
            assert node.durable_ids() >= recorded
        store.sync()
        assert store.safe_point() == 3
        eventually("it is well again", lambda: not store.status().problems)
        assert store.status().missing == 0
        append(store, 4)
        store.sync()
        assert store.read("c", 4).column("v").to_pylist() == [4]


def test_what_was_not_durable_when_the_directory_went_is_when_it_is_back(tmp_path: Path) -> None:
    """In the middle of making it durable, too: its files are not taken for gone."""
    root = tmp_path / "s"
    with nosync.open(root, settings=nosync.StoreSettings(background=False)) as store:
        node = store.node
        assert isinstance(node, Node)
        append(store, 0)
        for make in ("make_durable", "sync"):
            of = node.parts.queue if make == "make_durable" else node.small
            right = getattr(of, make)

            def and_it_stays_away(what: object, right: Callable[[object], object] = right) -> object:
                root.rename(tmp_path / "away")
                return right(what)

            setattr(of, make, and_it_stays_away)
            with pytest.raises(nosync.StorageError, match=REFUSED):
                store.sync()
            (tmp_path / "away").rename(root)
            setattr(of, make, right)
        store.sync()
        assert store.safe_point() == 0


def test_a_store_that_is_closed_while_its_directory_is_away_says_so_and_gives_it_back(tmp_path: Path) -> None:
    store = nosync.open(tmp_path / "s")
    append(store, 0)
    (tmp_path / "s").rename(tmp_path / "there")
    with pytest.raises(nosync.StorageError, match=REFUSED):
        store.close()
    assert not (tmp_path / "s").exists(), "no catalog was made there"
    with nosync.open(tmp_path / "there") as again:
        assert again.read("c", 0).num_rows == 1
        again.sync()
        assert again.safe_point() == 0


def test_a_daemon_whose_directory_was_moved_acknowledges_nothing_and_says_why(tmp_path: Path) -> None:
    with running(tmp_path, ("n1", "n2")) as daemons, daemons.open("n1") as store:
        append(store, 0)
        eventually("it is safe", lambda: daemons.safe_point("n1") == 0)
        root, away = daemons.data("n1"), tmp_path / "away"
        root.rename(away)
        with pytest.raises(nosync.StorageError):
            append(store, 1)
        with pytest.raises(nosync.ReplicationError, match=REFUSED):
            store.sync()
        assert store.safe_point() == 0
        assert REFUSED in store.node.problems["the data directory"]
        away.rename(root)
        append(store, 1)
        eventually("it goes on", lambda: daemons.safe_point("n1") == 1)
        store.sync()
        eventually("it is well", lambda: not daemons.status("n1").problems)
