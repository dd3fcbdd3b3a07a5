"""New files are seen as they come, wherever below the watched directories; where some were not told of, all are."""

from __future__ import annotations

import errno
import logging
import os
import queue
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nosync.replication.daemon import directory_watch as module
from nosync.replication.daemon.directory_watch import Watch

PATIENCE_S = 10.0


class Seen:
    """A watch and what it told of."""

    def __init__(self, root: Path) -> None:
        self.watch = Watch([root])
        self.told: queue.Queue[Path] = queue.Queue()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for paths in self.watch.changes():
            for path in paths:
                self.told.put(path)

    def wait_for(self, *wanted: Path) -> set[Path]:
        """All that was told until these were. Raises queue.Empty where one never is."""
        found: set[Path] = set()
        while not found.issuperset(wanted):
            found.add(self.told.get(timeout=PATIENCE_S))
        return found

    def close(self) -> None:
        self.watch.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.watch.close()


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    (tmp_path / "watched" / "old").mkdir(parents=True)
    (tmp_path / "watched" / "old" / "there").touch()
    found = Seen(tmp_path / "watched")
    yield found
    found.close()


def test_what_is_there_and_what_comes(seen: Seen, tmp_path: Path) -> None:
    root = tmp_path / "watched"
    assert seen.wait_for(root / "old" / "there") == {root / "old" / "there"}
    (tmp_path / "outside").touch()
    (root / "old" / "linked").hardlink_to(tmp_path / "outside")
    assert seen.wait_for(root / "old" / "linked") == {root / "old" / "linked"}
    (tmp_path / "outside").rename(root / "old" / "moved")
    assert seen.wait_for(root / "old" / "moved") == {root / "old" / "moved"}


def test_directories_that_are_made_with_all_that_is_in_them_at_once(seen: Seen, tmp_path: Path) -> None:
    wanted = []
    for i in range(200):  # some files are there before their directory is watched, and some after
        directory = tmp_path / "watched" / f"stage{i}" / "f" / "0"
        directory.mkdir(parents=True)
        (directory / "0.layer").touch()
        wanted.append(directory / "0.layer")
    assert seen.wait_for(*wanted) >= set(wanted)
    late = wanted[0].with_name("1.layer")
    late.touch()
    assert late in seen.wait_for(late)


def test_a_directory_that_goes_and_comes_again(seen: Seen, tmp_path: Path) -> None:
    directory = tmp_path / "watched" / "d"
    for i in range(20):
        directory.mkdir()
        (directory / str(i)).touch()
        assert directory / str(i) in seen.wait_for(directory / str(i))
        (directory / str(i)).unlink()
        directory.rmdir()


def test_more_than_the_system_remembers(tmp_path: Path) -> None:
    """Nobody reads while more comes than the queue of events takes: then everything is told anew."""
    root = tmp_path / "watched"
    root.mkdir()
    watch = Watch([root])
    told = watch.changes()
    (root / "first").touch()
    assert next(told) == [root / "first"]
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    wanted = {root / "first"}
    for i in range(most + 10):
        (root / str(i)).touch()
        wanted.add(root / str(i))
    found: set[Path] = set()
    while not found >= wanted:
        found.update(next(told))
    watch.close()


def test_without_more_watches_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(module.INotify, "add_watch", refuse)
    watch = Watch([tmp_path / "a", tmp_path / "b"])
    with caplog.at_level(logging.WARNING):
        assert sorted(next(watch.changes())) == [tmp_path / "a" / "file", tmp_path / "b" / "file"]
    assert [record.message.count("max_user_watches") for record in caplog.records] == [1]
    watch.close()


def test_a_watch_that_ended_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of strangers had taken the descriptors for a moment, and nothing was noticed as long as the daemon lived."""
    told: queue.Queue[Path] = queue.Queue()
    begun: list[Watch] = []

    def begin() -> Watch:
        if len(begun) == 1 and not denied:
            denied.append(None)
            raise OSError(errno.EMFILE, "Too many open files")
        begun.append(Watch([tmp_path]))
        return begun[-1]

    denied: list[None] = []
    fails = threading.Event()
    read = Watch._read

    def failing(watch: Watch) -> list[Path]:
        if fails.is_set() and watch is begun[0]:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(watch)

    monkeypatch.setattr(Watch, "_read", failing)

    def noticed(paths: list[Path]) -> None:
        for path in paths:
            told.put(path)

    watcher = module.Watcher(begin, noticed, 0.01)
    watcher.start()
    try:
        assert watcher.is_watching
        (tmp_path / "a").touch()
        assert told.get(timeout=PATIENCE_S) == tmp_path / "a"
        fails.set()
        (tmp_path / "b").touch()
        while told.get(timeout=PATIENCE_S) != tmp_path / "b":
            pass
        assert (len(begun), len(denied)) == (2, 1)
    finally:
        watcher.stop()
    assert not watcher.is_watching


def test_a_process_may_have_many_descriptors(tmp_path: Path) -> None:
    """A watch that is begun when thousands are open has a large one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        (tmp_path / "watched").mkdir()
        seen = Seen(tmp_path / "watched")
        try:
            (tmp_path / "watched" / "a").touch()
            assert seen.wait_for(tmp_path / "watched" / "a")
        finally:
            seen.close()
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_directory_that_may_not_be_read_ends_no_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watch = module.INotify.add_watch

    def refusing(self: Any, path: Path, mask: Any) -> int:
        if Path(path).name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return int(add_watch(self, path, mask))

    monkeypatch.setattr(module.INotify, "add_watch", refusing)
    (tmp_path / "private").mkdir()
    (tmp_path / "open").mkdir()
    seen = Seen(tmp_path)
    try:
        (tmp_path / "open" / "one").write_text("")
        seen.wait_for(tmp_path / "open" / "one")
        (tmp_path / "later" / "private").mkdir(parents=True)
        (tmp_path / "later" / "two").write_text("")
        seen.wait_for(tmp_path / "later" / "two")
    finally:
        seen.close()
