"""Directories that did not change are not listed again; and nothing that changed is missed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nosync
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import LAYERS
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.listing import Listing
from nosync.testing.daemon_cluster import eventually

OpenStore = Callable[..., nosync.Store]


class Counted(Env):
    """Counts what is listed; time passes as the test says, and file systems note it in steps of `step_s`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.listed = 0
        self.now_s = 0.0
        self.step_s = step_s
        self.changes: dict[Path, float] = {}

    def monotonic_s(self) -> float:
        return self.now_s

    def list_dir(self, path: Path) -> list[str]:
        self.listed += 1
        return super().list_dir(path)

    def changed_ns(self, path: Path) -> int:
        """Coarse: changes of one step have the same time."""
        at_s = self.changes.get(path, 0.0)
        step = int(at_s / self.step_s) if self.step_s else int(at_s * 1e9)
        return step + 1 if path.exists() else 0


def make(env: Counted, root: Path, id: LayerId) -> None:
    path = root / LAYERS / id.path
    for directory in (path.parents[0], path.parents[1], path.parents[2], path.parents[3]):
        if not directory.exists():
            env.changes[directory.parent] = env.now_s
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    env.changes[path.parent] = env.now_s


def layer(stage: str, shard: int, t: int) -> LayerId:
    return LayerId(TraceId(stage, "f", Shard(shard, 4)), Description.of_epoch(t))


def test_what_stands_still_is_not_listed(tmp_path: Path) -> None:
    env = Counted()
    for shard in range(4):
        make(env, tmp_path, layer("sums", shard, 0))
    listing = Listing(LayerDirectory(tmp_path, 128, env))
    assert sum(map(len, listing.changed().values())) == 4
    for _ in range(3):  # until clocks of file systems have certainly moved on
        env.now_s += 1.0
        listing.changed()
    env.listed = 0
    env.now_s += 1.0
    assert listing.changed() == {}
    assert env.listed == 0
    make(env, tmp_path, layer("sums", 2, 1))
    (changed,) = listing.changed().items()
    assert (changed[0], sorted(changed[1])) == (
        layer("sums", 2, 1).trace, [Description.of_epoch(t) for t in (0, 1)]
    )  # fmt: skip
    assert env.listed == 1


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["make", "drop", "look"]), st.integers(0, 2), st.integers(0, 3), st.floats(0, 1.5)),
        max_size=40,
    ),
    step_s=st.sampled_from([0.0, 0.01, 2.0]),
)
def test_nothing_that_changed_is_missed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, float]], step_s: float
) -> None:
    """However coarse the file system's clock is: what the last looks said is what is there."""
    root = tmp_path_factory.mktemp("store")
    env = Counted(step_s)
    (root / LAYERS).mkdir()
    listing = Listing(LayerDirectory(root, 128, env))
    told: dict[TraceId, list[Description]] = {}
    for what, shard, t, pause_s in steps:
        env.now_s += pause_s
        id = layer("sums", shard, t)
        path = root / LAYERS / id.path
        if what == "make":
            make(env, root, id)
        elif what == "drop" and path.exists():
            path.unlink()
            env.changes[path.parent] = env.now_s
        elif what == "look":
            told |= listing.changed()
    for _ in range(3):  # a change may be told late, but not never
        env.now_s += 1.5
        told |= listing.changed()
    plain = LayerDirectory(root, 128)
    assert {trace: sorted(found) for trace, found in told.items()} == {
        trace: sorted(plain.descriptions(trace)) for trace in plain.traces()
    }


def test_a_trace_that_is_gone_is_told(tmp_path: Path) -> None:
    env = Counted()
    id = layer("sums", 0, 0)
    make(env, tmp_path, id)
    listing = Listing(LayerDirectory(tmp_path, 128, env))
    listing.changed()
    path = tmp_path / LAYERS / id.path
    path.unlink()
    path.parent.rmdir()
    env.changes[path.parent.parent] = env.now_s = 1.0
    assert listing.changed() == {id.trace: []}
    assert listing.changed() == {}


def test_a_node_at_rest_notices_what_comes_and_goes(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its background thread does, without anyone telling it, and without looking at everything."""
    store = open_store(settings=nosync.StoreSettings(scan_interval_s=0.02, merge=False))
    table = pa.table({"word": ["a"], "n": [1]})
    store.append("counts", t=0, rows=table, key=["word"])
    store.seal(0)
    store.sync()
    (first,) = store.directory.layer_ids()
    monkeypatch.setattr(store.node.parts.discovery, "scan", lambda: pytest.fail("everything was looked at"))
    other = LayerDirectory(store.directory.root, store.directory.key_groups)  # as a task in another process has it
    second = LayerId(first.trace, Description.of_epoch(1))
    other.publish(second, arrange(table, ["word"], whose="test"))
    eventually("it is noticed", lambda: store.node.parts.durability.is_recorded(second))
    assert store.node.durable_ids() == {first, second}
    os.unlink(other.path_of(second))
    eventually("it is missed", lambda: not store.node.parts.durability.is_recorded(second))
    assert store.node.durable_ids() == {first}
    monkeypatch.undo()
