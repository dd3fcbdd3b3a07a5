"""A change of branches that fails at any operation of the disk: what the store goes on with is what counts at the next start."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

import nosync
from nosync.testing import FaultyEnv
from tests.conftest import OpenStore
from tests.helpers.stores import filled, snapshot, words

Change = Callable[[nosync.Store], object]
CHANGES: dict[str, Change] = {
    "rewind": lambda store: store.rewind(1, keep_as=""),
    "rewind and keep": lambda store: store.rewind(1, keep_as="before"),
    "branch": lambda store: store.node.create_branch("what-if", "main", 2),
    "promote": lambda store: store.promote("other", keep_as="old"),
    "delete": lambda store: store.delete_branch("other"),
}


class FailsAt(FaultyEnv):
    """Fails at operation `at` from when it is armed, and at each removal of an entry after that if it is to be `worse`."""

    def __init__(self, at: int, *, worse: bool) -> None:
        super().__init__()
        self.at, self.worse, self.done, self.is_armed = at, worse, 0, False

    def _fail(self, operation: str, path: Path) -> None:
        super()._fail(operation, path)
        if not self.is_armed:
            return
        self.done += 1
        after = self.worse and self.done > self.at and operation == "unlink" and path.parent.name == "branches"
        if self.done == self.at or after:
            raise OSError(errno.EIO, "Input/output error", str(path))


@pytest.mark.parametrize("worse", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_store_goes_on_with_after_a_fault_counts(open_store: OpenStore, name: str, worse: bool) -> None:
    failed = 0
    for at in itertools.count(1):
        env = FailsAt(at, worse=worse)
        store = filled(open_store, name=f"s{at}", env=env)
        store.node.create_branch("other", "main", 2)
        store.sync()
        env.is_armed = True
        try:
            CHANGES[name](store)
        except nosync.NosyncError:
            failed += 1
        env.is_armed = False
        if env.done < at:
            break
        last = store.last_sealed()
        assert last is not None
        store.append("counts", t=last + 1, rows=words(more=at))
        store.seal(last + 1)
        store.sync()
        branches, rows = sorted(store.branches()), snapshot(store)
        assert store.safe_point() == last + 1
        store.close()
        again = open_store(f"s{at}")
        assert (sorted(again.branches()), snapshot(again)) == (branches, rows), f"operation {at}"
        with contextlib.closing(again):
            assert again.verify().ok
    assert failed > 0
