"""Archives of manifests: nothing is lost by putting many into one file, whatever happens on the way."""

from __future__ import annotations

import contextlib
import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.archive import Archive, Run, group_to_archive, publish_archive
from nosync.lsm.manifests.completeness import is_whole
from nosync.lsm.manifests.manifest import Content, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog, read_manifest_log
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.testing import FaultyEnv, crash
from tests.conftest import OpenStore
from tests.helpers.stores import snapshot, words

SIZE = 4


def settings(archive_epochs: int | None = SIZE) -> nosync.StoreSettings:
    return nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0, archive_epochs=archive_epochs)


def filled(open_store: OpenStore, epochs: int, first: int = 0, name: str = "store", **options: object) -> nosync.Store:
    store = open_store(name, settings=settings(), **options)
    for t in range(first, first + epochs):
        store.append("counts", t=t, rows=words(a=t, **{f"w{t}": 1}), key=["word"])
        store.seal(t)
    store.sync()
    return store


def archive_all(store: nosync.Store) -> None:
    assert isinstance(store.node, Node)
    before: list[str] = []
    while (now := files(store)) != before:
        before = now
        store.node.archive_manifests()


def files(store: nosync.Store, line: str = "main") -> list[str]:
    directory = store.directory.root / "manifests" / line
    return sorted((path.name for path in directory.iterdir()), key=lambda name: int(name.split("-")[0].split(".")[0]))


def manifests(store: nosync.Store, branch: str = "main") -> dict[Epoch, Manifest]:
    return dict(store.node.manifests(branch))


def test_what_an_archive_stands_for_is_had_back_whole(open_store: OpenStore) -> None:
    store = filled(open_store, 15, first=2)
    before, answers = manifests(store), snapshot(store)
    archive_all(store)
    assert files(store) == [
        *(f"{t}.json" for t in (2, 3)),
        "4-7.json",
        "8-11.json",
        *(f"{t}.json" for t in range(12, 17)),
    ]
    assert manifests(store) == before
    assert snapshot(store) == answers
    store.close()
    again = open_store(settings=settings())
    assert manifests(again) == before
    assert (again.first_sealed(), again.last_sealed(), again.safe_point()) == (2, 16, 16)
    assert again.missing() == []
    assert again.verify().manifests == 15
    assert snapshot(again) == answers
    again.append("counts", t=17, rows=words(b=1))
    again.seal(17)
    assert again.last_sealed() == 17


def test_epochs_are_archived_only_when_they_are_safe_and_old(open_store: OpenStore) -> None:
    env = FaultyEnv()
    store = filled(open_store, 4, env=env)
    env.fail("sync_file", errno.EIO, times=100, matches=lambda path: path.name == "4-5-0.layer")
    for t in range(4, 14):
        store.append("counts", t=t, rows=words(a=t))
        store.seal(t)
    with pytest.raises(nosync.StorageError):
        store.sync()
    archive_all(store)
    assert files(store) == [f"{t}.json" for t in range(14)], "the safe point stands at 3"
    env.faults.clear()
    store.sync()
    archive_all(store)
    assert files(store)[:3] == ["0-3.json", "4-7.json", "8.json"], "as many as one archive holds stay beside it"


def test_equal_manifests_make_equal_archives(open_store: OpenStore) -> None:
    """So nodes that archive by themselves agree, and an archive has no conflict with another."""
    made = []
    for name in ("one", "two"):
        store = filled(open_store, 9, name=name)
        archive_all(store)
        made.append((store.directory.root / "manifests" / "main" / "0-3.json").read_bytes())
    assert made[0] == made[1]


def test_an_archive_that_says_otherwise_is_not_taken_for_ours(open_store: OpenStore) -> None:
    store = filled(open_store, 9)
    before = manifests(store)
    other = [replace(before[Epoch(t)], meta={"other": t}) for t in range(4)]
    assert publish_archive(store.directory.root, other, Env())
    archive_all(store)
    assert "says other things" in "".join(store.status().problems.values())
    assert manifests(store) == before
    assert set(files(store)) == {"0-3.json", *(f"{t}.json" for t in range(9))}


def test_every_flipped_byte_is_noticed(open_store: OpenStore) -> None:
    store = filled(open_store, 9)
    archive_all(store)
    root = store.directory.root
    path = root / "manifests" / "main" / "0-3.json"
    text = path.read_bytes()
    for at in range(0, len(text), 7):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(CorruptionError):
            Archive.read(root, "main", path.name, Env())
    for length in (0, 1, len(text) // 2, text.index(b"\n"), text.index(b"\n") + 1, len(text) - 1):
        path.write_bytes(text[:length])
        with pytest.raises(CorruptionError):
            Archive.read(root, "main", path.name, Env())
    path.write_bytes(text)
    shutil.copy(path, path.with_name("4-7.json"))
    with pytest.raises(CorruptionError, match="holds 4 epochs of main, 0 to 3"):
        Archive.read(root, "main", "4-7.json", Env())


@pytest.mark.parametrize("operation", ["create", "link", "sync_file", "sync_dir", "unlink"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_that_fails_while_archiving_loses_nothing(open_store: OpenStore, operation: str, nth: int) -> None:
    env = FaultyEnv()
    store = filled(open_store, 13, env=env)
    before = manifests(store)
    seen = 0

    def the_nth(path: Path) -> bool:
        nonlocal seen
        seen += "manifests" in path.parts or path.parent.name == "tmp"
        return seen == nth

    env.fail(operation, errno.ENOSPC, matches=the_nth)
    archive_all(store)
    assert [fault.times for fault in env.faults] == [0], "it failed"
    assert manifests(store) == before
    store.append("counts", t=13, rows=words(a=13))
    store.seal(13)
    store.sync()
    assert store.safe_point() == 13, "only archiving waits"
    archive_all(store)
    store.node.archive_manifests()
    assert files(store)[:2] == ["0-3.json", "4-7.json"]
    assert not store.status().problems
    assert {t: m for t, m in manifests(store).items() if t < 13} == before


@pytest.mark.parametrize("calls", range(12))
def test_a_crash_while_archiving_loses_nothing(open_store: OpenStore, calls: int) -> None:
    """The process dies at any of its file operations, and then the power goes."""
    env = FaultyEnv()
    store = filled(open_store, 9, env=env)
    before = manifests(store)
    done = len(env.calls)

    class Died(BaseException):
        pass

    def die(operation: str, path: Path) -> None:
        env.calls.append((operation, path))
        if len(env.calls) - done > calls:
            raise Died

    env._enter = die  # type: ignore[method-assign]
    with contextlib.suppress(Died):
        archive_all(store)
    assert len(env.calls) - done > min(calls, 8), "it does at least so much"
    del env._enter  # type: ignore[attr-defined]
    crash(store)
    env.lose_power(store.directory.root, lambda n: 1)
    again = open_store(settings=settings(), env=env)
    assert manifests(again) == before
    archive_all(again)
    assert files(again) == ["0-3.json", *(f"{t}.json" for t in range(4, 9))]
    assert manifests(again) == before


def test_a_manifest_that_says_otherwise_than_its_archive_goes_to_quarantine(open_store: OpenStore) -> None:
    """A job that was replaced may still seal an epoch that it does not know to be archived."""
    store = filled(open_store, 9)
    other = filled(open_store, 2, name="other")
    archive_all(store)
    before = manifests(store)
    store.close()
    other.append("counts", t=2, rows=words(z=99))
    other.seal(2)
    main = store.directory.root / "manifests" / "main"
    shutil.copy(other.directory.root / "manifests" / "main" / "2.json", main / "2.json")
    again = open_store(settings=settings())
    assert manifests(again) == before
    archive_all(again)
    assert not (main / "2.json").exists()
    assert any("2.json" in path.name for path in (again.directory.root / "quarantine").iterdir())


def test_sealing_an_archived_epoch_again_compares_with_what_is_recorded(open_store: OpenStore) -> None:
    store = filled(open_store, 9)
    archive_all(store)
    entries = store.node.manifests()[Epoch(2)].entries
    sealed = store.node.seal(2, [e.id for e in entries])
    assert sealed.entries == entries
    assert "2.json" not in files(store)
    other = {entries[0].id: Content(Digest("0" * 64), 3)}
    with pytest.raises(nosync.DeterminismError, match="timestamp 2 is already sealed"):
        store.node.seal(2, [e.id for e in entries], contents=other)


def test_a_lost_layer_of_an_archived_epoch_is_named(open_store: OpenStore) -> None:
    store = filled(open_store, 13)
    archive_all(store)
    assert store.missing() == []
    store.directory.path_of(store.node.manifests()[Epoch(1)].entries[0].id).unlink()
    assert [(m.t, m.entry.id.trace.stage) for m in store.missing()] == [(1, "counts")]
    store.close()
    with open_store(read_only=True) as looking:
        assert looking.status().missing == 1


def test_a_run_that_was_not_merged_is_asked_about_once(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each of its epochs: it looks at every layer of its traces."""
    store = filled(open_store, 13)
    archive_all(store)
    store.close()
    asked: list[Run] = []

    def asking(run: Run, *rest: Any) -> bool:
        asked.append(run)
        return is_whole(run, *rest)

    monkeypatch.setattr("nosync.lsm.node.safe_point.is_whole", asking)
    again = open_store(settings=settings())
    assert again.safe_point() == 12
    assert [run.first for run in asked] == [0, 4]


def test_merged_layers_stand_for_archived_epochs(open_store: OpenStore) -> None:
    store = filled(open_store, 13)
    archive_all(store)
    store.compact()
    assert store.missing() == []
    store.close()
    again = open_store(settings=settings())
    assert (again.safe_point(), again.missing()) == (12, [])
    assert again.status().missing == 0
    again.close()
    with open_store(read_only=True) as looking:
        assert looking.status().safe_point == 12


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 8])
def test_a_line_is_cut_inside_an_archive(open_store: OpenStore, cut: int) -> None:
    """What is left of the archive has files of its own again: those it was made from."""
    store = filled(open_store, 13)
    main = store.directory.root / "manifests" / "main"
    texts = {path.name: path.read_bytes() for path in main.iterdir()}
    before = manifests(store)
    archive_all(store)
    store.rewind(cut, keep_as="")
    kept = {t: m for t, m in before.items() if t <= cut}
    assert manifests(store) == kept
    assert store.last_sealed() == cut
    for path in main.iterdir():
        if "-" not in path.name:
            assert path.read_bytes() == texts[path.name]
    store.append("counts", t=cut + 1, rows=words(x=1))
    store.seal(cut + 1)
    store.close()
    again = open_store(settings=settings())
    assert {t: m for t, m in manifests(again).items() if t <= cut} == kept
    assert again.last_sealed() == cut + 1
    assert again.read("counts", as_of=cut + 1).num_rows == cut + 3


def test_a_reader_that_listed_before_reads_what_stands_for_it_now(open_store: OpenStore, tmp_path: Path) -> None:
    store = filled(open_store, 13)
    before = manifests(store)
    root = store.directory.root

    class Late(Env):
        """Between listing and reading the node archives."""

        listed = 0

        def list_dir(self, path: Path) -> list[str]:
            names = super().list_dir(path)
            if path.parent.name == "manifests" and self.listed < 3:
                self.listed += 1
                store.node.archive_manifests()  # type: ignore[attr-defined]
            return names

    sealed = ManifestLog("main", root, Late())
    assert read_manifest_log(sealed, root, sealed._env) == []
    assert dict(sealed) == before


def test_a_read_only_store_follows(open_store: OpenStore) -> None:
    store = filled(open_store, 6)
    with open_store(read_only=True) as looking:
        assert looking.last_sealed() == 5
        for t in range(6, 20):
            store.append("counts", t=t, rows=words(a=t))
            store.seal(t)
            store.sync()
            store.node.archive_manifests()  # type: ignore[attr-defined]
            assert looking.last_sealed() == t
            assert dict(looking._timelines().manifests()) == manifests(store)
        assert len(looking._timelines().manifests().singles()) < 8, "what is archived is not kept in memory"


def test_a_damaged_archive_is_set_aside_and_said(open_store: OpenStore) -> None:
    store = filled(open_store, 13)
    archive_all(store)
    store.close()
    path = store.directory.root / "manifests" / "main" / "0-3.json"
    path.write_bytes(path.read_bytes()[:-5])
    with open_store(read_only=True) as looking:
        assert any("0-3.json" in error for error in looking.verify().errors)
        with pytest.raises(CorruptionError, match=r"0-3\.json"):
            looking.last_sealed()
    again = open_store(settings=settings())
    assert not path.exists()
    assert (again.first_sealed(), again.last_sealed()) == (4, 12)


@pytest.mark.parametrize(
    ("epochs", "until", "layers", "expected"),
    [
        (range(3000), 2999, 1, range(1000)),
        (range(3000), 999, 1, range(1000)),
        (range(3000), 998, 1, None),
        (range(1, 3000), 2999, 1, range(1000, 2000)),
        (range(500, 900), 900, 1, None),
        ([*range(500), *range(501, 1000)], 2000, 1, None),
        (range(3000), 2999, 50, range(1000)),
        (range(3000), 2999, 51, range(100)),
        (range(3000), 2999, 5000, range(10)),
        (range(3000), 2999, 10**6, range(10)),
        (range(10, 3000), 2999, 5000, range(10, 20)),
        ([], 0, 1, None),
    ],
)
def test_which_group_is_next(epochs: range, until: int, layers: int, expected: range | None) -> None:
    assert group_to_archive([Epoch(t) for t in epochs], until, 1000, lambda t: layers) == expected


def test_a_setting_that_cannot_be_is_refused() -> None:
    with pytest.raises(nosync.InvalidInputError, match="archive_epochs is 1"):
        nosync.StoreSettings(archive_epochs=1)


def test_without_archives_each_epoch_keeps_its_file(open_store: OpenStore) -> None:
    store = open_store(settings=settings(None))
    for t in range(9):
        store.append("counts", t=t, rows=pa.table({"word": ["a"], "n": [t]}), key=["word"])
        store.seal(t)
    store.sync()
    archive_all(store)
    assert files(store) == [f"{t}.json" for t in range(9)]


@pytest.mark.parametrize(
    ("note_bytes", "archives"), [(100, ["0-19.json"]), (2000, ["0-9.json", "10-19.json"]), (9000, [])]
)
def test_an_archive_is_no_larger_than_what_is_read_whole(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, note_bytes: int, archives: list[str]
) -> None:
    monkeypatch.setattr("nosync.lsm.manifests.archive.MOST_ARCHIVE_BYTES", 30_000)
    few = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=20)
    store = open_store(settings=few)
    for t in range(42):
        store.append("counts", t=t, rows=words(a=t), key=["word"])
        id = LayerId(TraceId("counts", "raw", Shard(0)), Description.of_epoch(t))
        store.node.seal(t, [id], meta={"note": "x" * note_bytes})
    store.sync()
    assert isinstance(store.node, Node)
    for _ in range(4):
        store.node.archive_manifests()
    found = sorted(path.name for path in (store.directory.root / "manifests/main").glob("*-*.json"))
    assert found[: len(archives)] == archives
    assert bool(found) == bool(archives)
    store.close()
    store = open_store(settings=few)
    assert store.read("counts", 3)["n"].to_pylist() == [3]
    assert (store.safe_point(), store.status().problems, store.verify().errors) == (41, {}, ())
