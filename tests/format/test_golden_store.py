"""The golden store: what an earlier version wrote is opened, read as of every epoch, gone on from, recovered and
replayed.

Fingerprints are names on disk. Where a module moves or a class is renamed they must stay as they are, or every store is
refused.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import nosync
from nosync.flow.binder import bind
from nosync.lsm.model.layer import parse_path
from tests.format.golden_flow import EPOCHS, inputs, make_flow, triple
from tests.format.golden_functions import make_flow as make_functions
from tests.format.make_golden import state_of
from tests.helpers.runner import StoreRunner, meanings_before, parse_ddl

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ["v0.1"]


def expected_of(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"{version}-store.json").read_text())
    return found


def unpacked(version: str, target: Path) -> Path:
    with tarfile.open(GOLDEN / f"{version}-store.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / "store"


def opened(root: Path) -> nosync.Store:
    settings = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=3)
    return nosync.open(root, settings=settings)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(version: str, tmp_path: Path) -> Path:
    return unpacked(version, tmp_path)


def changed_flow() -> nosync.Dataflow:
    return make_flow().changed({"doubled": triple}, lambda flow: None, [])


def runner_of(store: nosync.Store, branch: str) -> StoreRunner:
    flow = make_flow() if branch == "main" else changed_flow()
    found = StoreRunner(flow, store, seed=11, branch=branch)
    found._begin_spans(EPOCHS)
    return found


def test_the_fingerprint_of_every_kind_of_stage(version: str) -> None:
    bound = bind(make_flow(), parse_ddl, meanings=meanings_before(make_flow()))
    assert {name: stage.fingerprint for name, stage in bound.stages.items()} == expected_of(version)["fingerprints"]


def test_the_fingerprints_of_functions_without_a_version(version: str) -> None:
    """Two versions of Python compile to different bytecode, so they are those of one."""
    expected = json.loads((GOLDEN / f"{version}-functions.json").read_text())
    if expected["python"] != f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip(f"fingerprints of Python {expected['python']}")
    bound = bind(make_functions(), parse_ddl, meanings=meanings_before(make_functions()))
    assert {name: stage.fingerprint for name, stage in bound.stages.items()} == expected["fingerprints"]


def test_it_is_whole(root: Path) -> None:
    with opened(root) as store:
        assert store.missing() == []
        assert store.verify().errors == ()
        assert store.status().problems == {}
        assert (store.last_sealed(), store.safe_point(), store.pins()) == (EPOCHS - 1, EPOCHS - 1, {"before": 2})


@pytest.mark.parametrize("branch", ["main", "tripled"])
def test_it_reads_as_of_every_epoch(root: Path, version: str, branch: str) -> None:
    with opened(root) as store:
        runner = runner_of(store, branch)
        assert [state_of(runner, t) for t in range(EPOCHS)] == expected_of(version)[branch]


@pytest.mark.few(1, "make properties")
@pytest.mark.parametrize("branch", ["main", "tripled"])
def test_it_goes_on_as_a_store_that_was_never_closed(root: Path, version: str, branch: str, tmp_path: Path) -> None:
    """Another epoch on top of what was read from disk is what a store of its own says after all of them."""
    with opened(root) as store:
        runner = runner_of(store, branch)
        runner.advance(EPOCHS, inputs(EPOCHS))
        runner._begin_spans(EPOCHS)
        found = state_of(runner, EPOCHS)
    if branch == "main":
        with opened(tmp_path / "anew") as store:
            anew = StoreRunner(make_flow(), store, seed=3, meanings=meanings_before(make_flow()))
            for t in range(EPOCHS + 1):
                anew.advance(t, inputs(t))
            anew._begin_spans(EPOCHS)
            assert state_of(anew, EPOCHS) == found
    else:
        assert found["sums"] != expected_of(version)["tripled"][-1]["sums"]


def test_what_is_lost_is_computed_again_to_the_same_digests(root: Path, version: str, tmp_path: Path) -> None:
    """All layers but the sources' are deleted; running the epochs again gives every digest that the manifests list."""
    digests = expected_of(version)["digests"]
    with opened(tmp_path / "anew") as store:
        anew = StoreRunner(make_flow(), store, seed=5, meanings=meanings_before(make_flow()))
        for t in range(EPOCHS):
            anew.advance(t, inputs(t))
        listed = {str(e.id.path): e.digest[:16] for m in store.node.manifests().values() for e in m.entries}
    assert listed == digests
    assert all(parse_path(Path(path)) is not None for path in digests)  # type: ignore[arg-type]
    shutil.rmtree(root / "layers" / "sums")
    with opened(root) as store:
        lost = {(m.t, m.entry.id.trace.shard.index) for m in store.missing() if m.entry.id.trace.stage == "sums"}
        assert lost == {(t, shard) for t in range(EPOCHS) for shard in range(2)}
        runner = runner_of(store, "main")
        for t in range(EPOCHS):
            runner.advance(t, inputs(t))
        store.sync()
        assert [m for m in store.missing() if m.timeline == "main"] == []
        assert [state_of(runner, t) for t in range(EPOCHS)] == expected_of(version)["main"]


def test_a_branch_of_it_replays(root: Path, version: str) -> None:
    with opened(root) as store:
        runner = runner_of(store, "main")
        again = runner.make_branch("again", 4, changed_flow(), ["doubled"])
        for t in range(5, EPOCHS):
            again.replay(t)
        again._begin_spans(EPOCHS)
        assert [state_of(again, t) for t in range(EPOCHS)] == expected_of(version)["tripled"]
