"""What a node tells of files of which peers have other contents."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from nosync.replication.daemon.conflicts import Conflicts
from nosync.replication.protocol.file_names import FileName


def test_thousands_of_conflicts_are_told_in_one_message() -> None:
    problems = {"manifests/main/0.json": "another problem"}
    found = {FileName(f"manifests/main/{t}.json"): ("n2", "a" * 64, "b" * 64) for t in range(5000)}
    left: dict[FileName, str] = {FileName("manifests/main/0.json"): "n3"}
    copies = SimpleNamespace(conflicts=lambda: found, discarded_elsewhere=lambda: left)
    peer = SimpleNamespace(node="n4", differs_from={"main": 7})
    replica = SimpleNamespace(copies=copies, peers={"n4": peer})
    shared: Any = SimpleNamespace(lock=threading.RLock(), replica=replica)
    conflicts = Conflicts(shared, problems)
    conflicts.tell()
    assert len(problems) == 1 + 1000 + 1 + 1
    assert "from epoch 7 on" in problems["two histories of main with n4"]
    assert problems["more conflicts"] == "4,000 files more: nosync conflicts lists all"
    assert len(conflicts.names()) == 5000
    found = dict(list(found.items())[:2])
    left.clear()
    peer.differs_from = {}
    conflicts.tell()
    assert problems.keys() == {
        "manifests/main/0.json",
        "conflict manifests/main/0.json",
        "conflict manifests/main/1.json",
    }
