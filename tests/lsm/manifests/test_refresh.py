"""What a node learns of files that others published: the next epochs from these files alone, anything else by a look at
all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.manifests.manifest import Manifest, publish_manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.platform.env import Env
from tests.conftest import OpenStore

EPOCHS = 6


def put(store: nosync.Store, t: int) -> None:
    store.append("c", t=t, rows=pa.table({"k": [t], "v": [t]}), key=["k"])
    store.seal(t)


def path_of(t: int, line: str = "main") -> PurePosixPath:
    return PurePosixPath("manifests", line, f"{t}.json")


@pytest.fixture
def store(open_store: OpenStore) -> nosync.Store:
    store = open_store(settings=nosync.StoreSettings(background=False, archive_epochs=4))
    for t in range(EPOCHS):
        put(store, t)
    return store


@pytest.fixture
def lines(store: nosync.Store) -> Timelines:
    return Timelines(store.directory.root, store.directory.env)


@pytest.mark.parametrize(
    "came",
    [
        [EPOCHS + 1, EPOCHS, EPOCHS + 2],
        pytest.param([EPOCHS], id="the others are there, though nobody told of them"),
        pytest.param([EPOCHS + 2], id="so are those before"),
        pytest.param([EPOCHS - 1, EPOCHS], id="told of again"),
    ],
)
def test_the_next_epochs_are_read_in_any_order(store: nosync.Store, lines: Timelines, came: list[int]) -> None:
    for t in range(EPOCHS, EPOCHS + 3):
        put(store, t)
    learned = lines.follow(map(path_of, came))
    assert learned is not None
    assert [manifest.t for manifest in learned] == [EPOCHS, EPOCHS + 1, EPOCHS + 2]
    again = Timelines(store.directory.root, store.directory.env)
    assert dict(lines.manifests().items()) == dict(again.manifests().items())
    (trace,) = {entry.id.trace for entry in learned[0].entries}
    assert lines.sealed_until(trace) == again.sealed_until(trace)
    assert lines.histories() == again.histories()
    assert lines.newest() == again.newest() == [EPOCHS + 2]
    assert lines.follow(map(path_of, came)) == [], "known by now"


def test_an_epoch_that_comes_before_its_time_is_read_with_the_one_it_waits_for(
    store: nosync.Store, lines: Timelines, tmp_path: Path
) -> None:
    """As from peers, who send them in any order."""
    for t in range(EPOCHS, EPOCHS + 3):
        put(store, t)
    late = store.directory.root / path_of(EPOCHS)
    late.rename(tmp_path / "late")
    for t in (EPOCHS + 2, EPOCHS + 1):
        assert lines.follow([path_of(t)]) is None
        assert lines.refresh()[0] == []
    (tmp_path / "late").rename(late)
    learned = lines.follow([path_of(EPOCHS)])
    assert learned is not None
    assert [manifest.t for manifest in learned] == [EPOCHS, EPOCHS + 1, EPOCHS + 2]


def test_a_known_epoch_that_is_another_one_now_is_for_a_look_at_all(store: nosync.Store, lines: Timelines) -> None:
    before = lines.manifests()[EPOCHS - 1]
    (store.directory.root / before.path).unlink()
    publish_manifest(store.directory.root, Manifest(before.timeline, before.t, before.entries, {"other": 1}), Env())
    assert lines.follow([before.path]) is None
    lines.refresh()
    assert lines.manifests()[EPOCHS - 1].meta == {"other": 1}


@pytest.mark.parametrize(
    "came",
    [
        [path_of(EPOCHS + 9)],
        [path_of(0, "other")],
        [path_of(EPOCHS), PurePosixPath("pins", "1-a.json")],
        [path_of(EPOCHS), PurePosixPath("branches", "1.json")],
        [PurePosixPath("manifests", "main", "0-3.json")],
        [PurePosixPath("manifests", "main", "6.json.bak")],
        [PurePosixPath("manifests", "6.json")],
        [PurePosixPath("discarded.json")],
    ],
)
def test_anything_else_is_for_a_look_at_all(store: nosync.Store, lines: Timelines, came: list[PurePosixPath]) -> None:
    for t in range(EPOCHS, EPOCHS + 3):
        put(store, t)
    assert lines.follow(came) is None
    assert lines.last_sealed() == EPOCHS - 1, "nothing was taken over"
    learned, _, _ = lines.refresh()
    assert [manifest.t for manifest in learned] == [EPOCHS, EPOCHS + 1, EPOCHS + 2]


@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])], ids=["gone", "torn"]
)
def test_what_cannot_be_read_is_for_a_look_at_all(
    store: nosync.Store, lines: Timelines, harm: Callable[[Path], object]
) -> None:
    for t in range(EPOCHS, EPOCHS + 2):
        put(store, t)
    harm(store.directory.root / path_of(EPOCHS + 1))
    assert lines.follow([path_of(EPOCHS), path_of(EPOCHS + 1)]) is None
    assert lines.last_sealed() == EPOCHS - 1
    lines.refresh()
    assert lines.last_sealed() == EPOCHS


def test_a_node_learns_without_listing_all_epochs(open_store: OpenStore) -> None:
    """However many there are: of what comes next the file is read, and the directory of manifests is left alone."""
    store, other = open_store(settings=nosync.StoreSettings(background=False)), open_store("other")
    for t in range(EPOCHS):
        put(store, t)
        put(other, t)
    put(other, EPOCHS)
    listed: list[Path] = []
    env, list_dir = store.directory.env, store.directory.env.list_dir
    env.list_dir = lambda path: (listed.append(path), list_dir(path))[1]  # type: ignore[method-assign, func-returns-value]
    for kind in ("layers", "manifests"):
        for path in (other.directory.root / kind).rglob(f"{EPOCHS}*"):
            path.rename(store.directory.root / path.relative_to(other.directory.root))
    store.node.note_files([path_of(EPOCHS)])  # type: ignore[attr-defined]
    store.node.parts.upkeep.drain()  # type: ignore[attr-defined]
    assert store.last_sealed() == EPOCHS
    assert store.directory.root / "manifests" / "main" not in listed
    store.sync()
    assert store.safe_point() == EPOCHS
    assert store.read("c").num_rows == EPOCHS + 1
