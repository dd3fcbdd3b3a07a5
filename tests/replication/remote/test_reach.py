"""Up to where a bucket is whole: against an oracle that asks for every file of every epoch."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.released_inputs import Released
from nosync.lsm.model.timestamp import Epoch
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.remote.pack import Reached
from nosync.replication.remote.reach import Reach, remotely_safe
from tests.conftest import OpenStore
from tests.helpers.remotes import QUIET, epochs

NOTHING_WENT = Released(Epoch(-1), {})


@pytest.fixture
def of_store(open_store: OpenStore) -> tuple[object, dict[str, str]]:
    """A store with a branch, and its files with their digests."""
    store = open_store(settings=QUIET)
    epochs(store, range(4), stages=("a", "b"))
    store.rewind(2)
    epochs(store, range(3, 6), mark="b", stages=("a", "b"))
    digests = {str(FileName.of_layer(record.id)): record.digest for record in store.node.durable_records()}  # type: ignore[attr-defined]
    return store, digests


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_an_epoch_is_safe_when_all_that_it_lists_is_there(
    of_store: tuple[object, dict[str, str]], data: st.DataObject
) -> None:
    store, digests = of_store
    timelines = store.node.timelines  # type: ignore[attr-defined]
    small = [str(path) for path in store.node.small.durable()]  # type: ignore[attr-defined]
    everything = sorted([*digests, *small])
    missing = set(data.draw(st.lists(st.sampled_from(everything), max_size=3)))
    other = set(data.draw(st.lists(st.sampled_from(sorted(digests)), max_size=1)))
    held = Inventory(
        FileVersion(FileName(name), "other" if name in other else digests.get(name, "small"), 1)
        for name in everything
        if name not in missing
    )
    before = Reached({"before": 1}, 0)
    found = Reach(timelines, lambda path: "small").of(held, before, NOTHING_WENT)
    safe = {branch: oracle(timelines, branch, missing | other) for branch in timelines.refs.names}
    if "branches/1.json" in missing or safe[MAIN] < 2:
        assert found == before
        return
    assert found.entries == 1
    for branch, t in safe.items():
        assert remotely_safe(timelines, found, branch) == (t if t >= 0 else None)


def oracle(timelines: object, branch: str, missing: set[str]) -> int:
    safe = -1
    for t, manifest in timelines.manifests(branch).items():  # type: ignore[attr-defined]
        names = [str(manifest.path), *(str(PurePosixPath("layers", entry.id.path)) for entry in manifest.entries)]
        if missing.intersection(names):
            return safe
        safe = t
    return safe


def test_merged_layers_and_archives_stand_for_what_they_replaced(open_store: OpenStore) -> None:
    store = open_store(settings=QUIET)
    epochs(store, range(12))
    store.compact()
    node = store.node
    node.archive_manifests()  # type: ignore[attr-defined]
    store.sync()
    names = [str(path) for path in node.small.durable()]  # type: ignore[attr-defined]
    assert any("-" in PurePosixPath(name).name for name in names), "there is an archive"
    versions = [FileVersion(FileName(name), "small", 1) for name in names]
    versions += [FileVersion(FileName.of_layer(record.id), record.digest, 1) for record in node.durable_records()]  # type: ignore[attr-defined]
    reach = Reach(node.timelines, lambda path: None)
    assert reach.of(Inventory(versions), Reached(), NOTHING_WENT) == Reached({"main": 11}, 0)
    archive = next(name for name in names if "-" in PurePosixPath(name).name)
    without = Inventory(version for version in versions if version.name != archive)
    assert Reach(node.timelines, lambda path: None).of(without, Reached(), NOTHING_WENT).epochs.get("main", -1) < 4
