"""The end of what is kept in order is lost: newest manifests, all of them, the newest entry of the log of branches. It
is named, reads of it raise, and no number is sealed after which it could never be sealed again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.manifests.remembered import SEALED_META
from nosync.lsm.node.node import Node
from tests.conftest import OpenStore

SETTINGS = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0, merge=False)


def rows(t: int, mark: str = "a") -> pa.Table:
    return pa.table({"k": [f"{mark}{t}"], "v": pa.array([t], pa.int64())})


def epochs(store: nosync.Store, numbers: range, mark: str = "a") -> None:
    for t in numbers:
        store.append("c", t=t, rows=rows(t, mark), key=["k"])
        store.seal(t)
    store.sync()


def keys_of(store: nosync.Store, as_of: int | None = None) -> set[str]:
    return set(store.read("c", as_of).column("k").to_pylist())


def filled(open_store: OpenStore, count: int = 6) -> Path:
    """The root of a store that was closed."""
    store = open_store(settings=SETTINGS)
    epochs(store, range(count))
    store.close()
    return store.directory.root


def said(capsys: pytest.CaptureFixture[str], command: str, root: Path) -> str:
    """What a command says of what is wrong. `verify` has to fail."""
    if command == "verify":
        with pytest.raises(SystemExit, match="1"):
            main([command, str(root)])
    else:
        main([command, str(root)])
    return capsys.readouterr().err.replace("\n", " ")


def remove(path: Path) -> None:
    path.unlink()


def zero(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [remove, zero])
def test_the_newest_manifest(
    open_store: OpenStore, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None]
) -> None:
    root = filled(open_store)
    harm(root / "manifests/main/5.json")
    open_store(settings=SETTINGS).close()  # which moves a damaged file aside
    for command in ("verify", "status"):
        assert "sealed up to epoch 5, and the manifests of epoch 5 are not in manifests/main" in said(
            capsys, command, root
        )
    with nosync.open(root, read_only=True) as reader:
        for as_of in (None, 5, 6):
            with pytest.raises(nosync.LostEpochError, match="sealed up to epoch 5"):
                reader.read("c", as_of)
        assert keys_of(reader, 4) == {f"a{t}" for t in range(5)}
        assert reader.status().safe_point == 4
    store = open_store(settings=SETTINGS)
    with pytest.raises(nosync.LostEpochError, match=r"advance\(5\)"):
        store.read("c")
    assert not store.verify().ok
    assert any("sealed up to epoch 5" in text for text in store.status().problems.values())
    with pytest.raises(
        nosync.OutOfOrderError, match="next timestamp of branch main is 5, for the manifests of epoch 5"
    ):
        store.seal(6)
    store.seal(5)
    store.sync()
    assert keys_of(store) == {f"a{t}" for t in range(6)}
    assert store.verify().ok
    assert not store.status().problems
    assert store.safe_point() == 5


def test_all_manifests(open_store: OpenStore, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(open_store)
    shutil.rmtree(root / "manifests")
    for command in ("verify", "status"):
        assert "manifests of epochs 0 to 5 are not in" in said(capsys, command, root)
    store = open_store(settings=SETTINGS)
    store.append("c", t=6, rows=rows(6))
    for t in (1, 5, 6, 7):
        with pytest.raises(
            nosync.OutOfOrderError, match="the next timestamp of branch main is 0, for .* 0 to 5 are lost"
        ):
            store.seal(t)
    with pytest.raises(nosync.LostEpochError):
        store.read("c")
    with pytest.raises(nosync.LostEpochError):
        store.rewind(-1)  # would delete all layers
    for t in range(7):
        store.seal(t)
    assert keys_of(store) == {f"a{t}" for t in range(7)}
    store.sync()
    assert store.verify().ok


def test_the_first_manifest(open_store: OpenStore, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(open_store)
    (root / "manifests/main/0.json").unlink()
    for command in ("verify", "status"):
        assert "manifest of epoch 0 is not there" in said(capsys, command, root)
    store = open_store(settings=SETTINGS)
    assert store.safe_point() is None
    assert keys_of(store) == {f"a{t}" for t in range(6)}
    store.seal(0)
    store.sync()
    assert store.safe_point() == 5
    assert store.verify().ok


def test_archives(open_store: OpenStore) -> None:
    """The newest manifests go together with an archive."""
    settings = nosync.StoreSettings(background=False, grace_s=0.0, merge=False, archive_epochs=2)
    store = open_store(settings=settings)
    epochs(store, range(8))
    node = store.node
    assert isinstance(node, Node)
    for _ in range(4):
        node.archive_manifests()
    store.close()
    root = store.directory.root
    names = sorted(path.name for path in (root / "manifests/main").iterdir())
    assert "4-5.json" in names or "2-3.json" in names, names
    newest_archive = max(int(name.partition("-")[0]) for name in names if "-" in name)
    for name in names:
        if int(name.partition("-")[0].removesuffix(".json")) >= newest_archive:
            (root / "manifests/main" / name).unlink()
    with (
        nosync.open(root, read_only=True) as reader,
        pytest.raises(nosync.LostEpochError, match=f"epochs {newest_archive} to 7"),
    ):
        reader.read("c")


@pytest.mark.parametrize("sealed_after", [0, 2])
@pytest.mark.parametrize("catalog", [True, False])
def test_the_newest_entry_of_the_log_after_a_rewind(
    open_store: OpenStore, capsys: pytest.CaptureFixture[str], sealed_after: int, catalog: bool
) -> None:
    filled(open_store)
    store = open_store(settings=SETTINGS)
    store.rewind(2)
    epochs(store, range(3, 3 + sealed_after), "b")
    store.close()
    root = store.directory.root
    (root / "branches/1.json").unlink()
    if not catalog:
        shutil.rmtree(root / "catalog")
        if not sealed_after:
            return  # as if it had been copied before the rewind
    problem = "is missing" + (", and no entry names timeline rewind-1" if sealed_after else "")
    assert problem in said(capsys, "verify", root)
    with nosync.open(root, read_only=True) as reader:
        for as_of in (None, 5):
            with pytest.raises(nosync.CorruptionError, match="which timeline is main is not known"):
                reader.read("c", as_of)
    with pytest.raises(nosync.CorruptionError, match="nosync verify --repair"):
        open_store(settings=SETTINGS)


def test_an_entry_in_the_middle_of_the_log(open_store: OpenStore) -> None:
    """Who only reads is not given the old timeline either."""
    filled(open_store)
    store = open_store(settings=SETTINGS)
    store.rewind(2)
    store.rewind(1)
    store.close()
    (store.directory.root / "branches/1.json").unlink()
    with (
        nosync.open(store.directory.root, read_only=True) as reader,
        pytest.raises(nosync.CorruptionError, match=r"1\.json: is missing, and entries after it are there \(2\)"),
    ):
        reader.read("c")


def test_the_epoch_where_a_line_begins(open_store: OpenStore) -> None:
    """It is the parent's, and is sealed again as one of the parent's."""
    filled(open_store)
    store = open_store(settings=SETTINGS)
    store.rewind(3)
    store.close()
    root = store.directory.root
    shutil.rmtree(root / "catalog")  # the log shows it without that
    (root / "manifests/main/3.json").unlink()
    store = open_store(settings=SETTINGS)
    with pytest.raises(nosync.LostEpochError, match="sealed up to epoch 3"):
        store.read("c")
    store.seal(3)
    assert (root / "manifests/main/3.json").exists()
    assert keys_of(store) == {f"a{t}" for t in range(4)}
    epochs(store, range(4, 6), "b")
    assert keys_of(store) == {*(f"a{t}" for t in range(4)), "b4", "b5"}
    assert store.verify().ok


def test_an_epoch_that_is_being_written_is_not_lost(open_store: OpenStore) -> None:
    root = filled(open_store)
    store = open_store(settings=SETTINGS)
    store.append("c", t=6, rows=rows(6))
    store.append("c", t=7, rows=rows(7))
    store.sync()
    for sealed in (6, 7):
        with nosync.open(root, read_only=True) as reader:
            assert reader.verify().ok
            assert not reader.status().problems
            assert keys_of(reader) == {f"a{t}" for t in range(sealed)}
        assert store.verify().ok
        assert not store.status().problems
        store.seal(6)  # not durable yet
    store.close()
    shutil.copytree(root, root.parent / "copy", ignore=shutil.ignore_patterns("catalog", "LOCK"))
    assert open_store("copy", settings=SETTINGS).verify().ok


def test_what_was_dropped_or_given_another_line_is_not_lost(open_store: OpenStore) -> None:
    filled(open_store)
    store = open_store(settings=SETTINGS)
    store.rewind(3, "")
    epochs(store, range(4, 5), "b")
    store.rewind(4, "kept")
    store.rewind(1)
    store.delete_branch("kept")
    for _ in range(2):
        store.close()
        store = open_store(settings=SETTINGS)
        assert store.verify().ok
        assert not store.status().problems
        assert keys_of(store) == {"a0", "a1"}


@pytest.mark.parametrize("shown_by", ["merged", "pin", "told"])
def test_a_catalog_that_does_not_remember(open_store: OpenStore, shown_by: str) -> None:
    """Of an earlier version, or made anew: what was merged, pinned, or told to be safe was sealed."""
    settings = nosync.StoreSettings(background=False, grace_s=0.0)
    store = open_store(settings=settings)
    epochs(store, range(6))
    if shown_by == "merged":
        store.compact()
    if shown_by == "pin":
        store.pin("p", 5)
    store.close()
    root = store.directory.root
    catalog = Catalog(root / "catalog")
    catalog.remember({SEALED_META + "main": "", **({"safe/main": "5"} if shown_by == "told" else {})})
    catalog.close()
    (root / "manifests/main/5.json").unlink()
    store = open_store(settings=settings)
    with pytest.raises(nosync.LostEpochError, match="sealed up to epoch 5"):
        store.read("c")
    store.close()
    with (
        nosync.open(root, read_only=True) as reader,
        pytest.raises(nosync.LostEpochError, match="sealed up to epoch 5"),
    ):
        reader.read("c")


def test_a_store_that_is_open_when_it_happens(open_store: OpenStore) -> None:
    root = filled(open_store)
    store = open_store(settings=SETTINGS)
    with nosync.open(root, read_only=True) as reader:
        assert len(keys_of(reader)) == 6
        epochs(store, range(6, 7))
        assert len(keys_of(reader)) == 7
        (root / "manifests/main/6.json").unlink()
        with pytest.raises(nosync.LostEpochError, match="sealed up to epoch 6"):
            reader.read("c")
    assert "sealed up to epoch 6" in str(store.verify().errors)


def test_sealing_waits_for_no_disk(open_store: OpenStore) -> None:
    """What is remembered is written by who makes files durable, and is not synced."""
    store = open_store(settings=SETTINGS)
    node = store.node
    assert isinstance(node, Node)
    written: list[str] = []
    remember = node._catalog.remember
    node._catalog.remember = lambda meta: written.extend(meta) or remember(meta)  # type: ignore[method-assign,func-returns-value]
    store.append("c", t=0, rows=rows(0), key=["k"])
    store.seal(0)
    assert not written
    store.sync()
    assert written == [SEALED_META + "main"]
