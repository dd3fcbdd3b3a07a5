"""Pins of a kept checkpoint: a batch that has a name stays, whatever is removed meanwhile."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from nosync.checkpoints import retention
from nosync.checkpoints.keep import Keep, open_keep
from nosync.checkpoints.retention import CheckpointPin, clean, pin, pins, set_kept_batches, unpin
from nosync.lsm.errors import CorruptionError, InvalidInputError, NotAvailableError
from nosync.lsm.facts.or_set import add_element
from nosync.lsm.platform.env import Env
from tests.checkpoints.fake_query import FakeQuery
from tests.checkpoints.test_keep import follow


def test_pins(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    query.run(3)
    follow(query, keep)
    assert pin(keep, "before", 1) == pin(keep, "before", 1)
    with pytest.raises(InvalidInputError, match="pin 'before' holds batch 1"):
        pin(keep, "before", 2)
    assert [(p.name, p.batch) for p in pins(Keep(tmp_path / "data", "q", Env()))] == [("before", 1)]
    unpin(keep, "before")
    assert pins(keep) == []
    with pytest.raises(InvalidInputError, match="has no pin 'before'"):
        unpin(keep, "before")


def test_a_pin_that_comes_while_files_are_removed_holds_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    for _ in range(12):
        query.run()
        follow(query, keep)
    other, real, calls = Keep(tmp_path / "data", "q", Env()), retention.pins, list[int]()
    set_kept_batches(keep, 3)

    def meanwhile(of: Keep) -> list[CheckpointPin]:
        found = real(of)
        if of is not other and not calls:
            calls.append(1)
            pin(other, "before", 2)  # after this process has read which there are
        return found

    with monkeypatch.context() as patched:
        patched.setattr(retention, "pins", meanwhile)
        clean(keep)
    assert calls
    assert open_keep(tmp_path / "data", "q", Env()).at(2) == 2
    unpin(keep, "before")
    assert clean(keep) > 0
    with pytest.raises(NotAvailableError):
        pin(other, "late", 2)  # its index still has what is gone
    assert pins(keep) == []
    add_element(keep.data, PurePosixPath("checkpoints/q/pins"), "lost", {"name": "lost", "batch": 2}, keep.env)
    assert clean(keep) == 0
    assert "nothing is removed, for batch 2 is pinned and cannot be gone on from" in caplog.text


def test_a_damaged_pin_is_named(tmp_path: Path) -> None:
    query, keep = FakeQuery(tmp_path / "ck", "hdfs"), Keep(tmp_path / "data", "q", Env())
    query.run(1)
    follow(query, keep)
    pin(keep, "p")
    (path,) = (keep.root / "pins").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptionError, match="pins/p-"):
        pins(keep)
    assert clean(keep) == 0, "it may be of any batch"
