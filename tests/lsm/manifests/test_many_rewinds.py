"""Rewinding again and again, as those do who try things out: the store stays as quick, opens, and says what it should."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.manifests.branches import Refs, Timeline
from nosync.lsm.manifests.manifest import MAIN_TIMELINE, Manifest, publish_manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.json_file import publish_small
from tests.conftest import OpenStore


def seal(store: nosync.Store, t: int, n: int) -> None:
    store.append("counts", t=t, rows=pa.table({"word": ["a", "b"], "n": [t, n]}), key=["word"])
    store.seal(t)


def counts(store: nosync.Store, t: int) -> dict[str, int]:
    return {row["word"]: row["n"] for row in store.read("counts", as_of=t).to_pylist()}


@pytest.mark.parametrize("keep_as", [None, ""], ids=["kept", "dropped"])
def test_what_main_has_after_many_rewinds(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, keep_as: str | None
) -> None:
    """Beside a dict. Nothing is lost, and nothing waits for what went with a branch."""
    pick, store, mine = random.Random(7), open_store(), dict[int, int]()
    with caplog.at_level(logging.WARNING, "nosync"):
        for i in range(40):
            first = len(mine)
            for t in range(first, first + pick.randint(1, 3)):
                seal(store, t, 100 * i + t)
                mine[t] = 100 * i + t
            at = pick.randint(0, len(mine) - 1)
            store.rewind(at, keep_as)
            mine = {t: n for t, n in mine.items() if t <= at}
        seal(store, at + 1, -1)
        mine[at + 1] = -1
        store.sync()
    assert not caplog.messages
    for _ in range(2):
        assert {t: counts(store, t) for t in mine} == {t: {"a": t, "b": n} for t, n in mine.items()}
        assert store.last_sealed() == store.safe_point() == at + 1
        store.close()
        store = open_store()


def test_a_thousand_rewinds_one_from_another(tmp_path: Path) -> None:
    """Each goes on for an epoch more than the one before: every line holds one of the epochs that main has."""
    root, env, line = tmp_path / "store", Env(), MAIN_TIMELINE
    nosync.open(root).close()
    lines = 1200
    for i in range(lines):
        publish_manifest(root, Manifest(line, Epoch(i), ()), env)
        entry = {"do": "rewind", "name": f"r{i}", "line": f"r{i}", "parent": line, "at": i, "keep_as": None}
        publish_small(root, root / "branches" / f"{i + 1}.json", entry, env)
        line = f"r{i}"
    found = Timelines(root, env)
    sealed = found.manifests()
    assert (sealed.first, sealed.last, len(sealed)) == (0, lines - 1, lines)
    assert [*sealed] == [piece.t for piece in sealed.pieces() if isinstance(piece, Manifest)] == [*range(lines)]
    assert [sealed[t].timeline for t in (0, 1, 700, lines - 1)] == [MAIN_TIMELINE, "r0", "r699", f"r{lines - 2}"]
    assert sealed.gap(None) is None
    assert lines not in sealed
    found.prune()
    assert [*Timelines(root, env).manifests()] == [*range(lines)]


def line_of_epoch(refs: Refs, line: str, t: int) -> str:
    """Slow and obvious."""
    step = refs.timelines[line]
    while step.at is not None and t <= step.at:
        assert step.parent is not None
        step = refs.timelines[step.parent]
    return step.id


def test_the_lines_that_one_has_epochs_of() -> None:
    pick = random.Random(3)
    for _ in range(200):
        lines = {MAIN_TIMELINE: Timeline(MAIN_TIMELINE)}
        for i in range(pick.randint(1, 8)):
            lines[f"l{i}"] = Timeline(f"l{i}", pick.choice([*lines]), Epoch(pick.randint(0, 9)))
        refs = Refs(lines, {"main": pick.choice([*lines]), "other": pick.choice([*lines])})
        for line in lines:
            of = {t: line_of_epoch(refs, line, t) for t in range(12)}
            found = refs.left(line)
            assert [*found] == list(dict.fromkeys(of.values()))
            for id, end in found.items():
                last = max(t for t in of if of[t] == id)
                assert end == (None if id == line else last)
        kept = refs.kept_until()
        named = [{t: line_of_epoch(refs, line, t) for t in range(12)} for line in refs.names.values()]
        assert kept.keys() == {id for of in named for id in of.values()}
        for id, end in kept.items():
            last = max(t for of in named for t in of if of[t] == id)
            assert end == (None if id in refs.names.values() else last)


@pytest.mark.parametrize("keep_as", [None, ""], ids=["kept", "dropped"])
def test_an_epoch_looks_at_as_much_as_before(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, keep_as: str | None
) -> None:
    """And not at what each line had that was left."""
    looks, me, list_dir = [0], threading.get_ident(), Env.list_dir

    def counted(env: Env, path: Path) -> list[str]:
        looks[0] += threading.get_ident() == me
        return list_dir(env, path)

    def looked_at(t: int) -> int:
        before = looks[0]
        seal(store, t, 0)
        return looks[0] - before

    monkeypatch.setattr(Env, "list_dir", counted)
    store = open_store()
    seal(store, 0, 0)
    found = []
    for _ in range(30):
        found.append(looked_at(1))
        store.rewind(0, keep_as)
    assert max(found[-5:]) <= max(found[1:5]), found
