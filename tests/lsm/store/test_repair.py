"""One small file does not make a store unopenable: `nosync verify --repair` says what it will do, and writes it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.manifests.branches import ChangedStages, read_refs
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.manifests.remembered import ENTRY_META, KEY_GROUPS_META
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.lsm.platform.store_marker import read_marker
from tests.conftest import OpenStore

SETTINGS = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0, merge=False)
Harm = Callable[[Path], object]


def epochs(store: nosync.Store, numbers: range, mark: str) -> None:
    for t in numbers:
        store.append("c", t=t, rows=pa.table({"k": [f"{mark}{t}"]}), key=["k"])
        store.seal(t)
    store.sync()


def filled(open_store: OpenStore) -> Path:
    """Four epochs, of which the last one was rewound and given other rows; key groups are not the default ones."""
    store = open_store(settings=SETTINGS, key_groups=16)
    epochs(store, range(4), "a")
    store.rewind(2)
    epochs(store, range(3, 5), "b")
    store.close()
    return store.directory.root


RIGHT = {"a0", "a1", "a2", "b3", "b4"}


def keys_of(root: Path, branch: str = "main") -> set[str]:
    with nosync.open(root, settings=SETTINGS) as store:
        return set(store.read("c", branch=branch).column("k").to_pylist())


def remove(path: Path) -> None:
    path.unlink()


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def repaired(capsys: pytest.CaptureFixture[str], root: Path) -> list[str]:
    """Repairs, and returns what was said before: twice the same, and nothing was done the first time."""
    with pytest.raises(SystemExit):
        main(["verify", "--repair", "--json", str(root)])
    first = json.loads(capsys.readouterr().out)["repair"]
    assert not first["done"]
    main(["verify", "--repair", "--yes", "--json", str(root)])
    report = json.loads(capsys.readouterr().out)
    assert report["repair"] == first | {"done": True}
    assert report["errors"] == []
    return [f"{step['path']}: {step['what']}" for step in first["steps"]]


@pytest.mark.parametrize("catalog", ["new", "of an earlier version", "lost"])
@pytest.mark.parametrize("harm", [remove, zero, tear])
def test_the_marker(open_store: OpenStore, capsys: pytest.CaptureFixture[str], harm: Harm, catalog: str) -> None:
    root = filled(open_store)
    right = read_marker(root, Env())
    harm(root / "NOSYNC")
    if catalog == "lost":
        shutil.rmtree(root / "catalog")
    if catalog == "of an earlier version":
        kept = Catalog(root / "catalog")
        kept._db.delete(b"meta/" + KEY_GROUPS_META.encode())
        kept.close()
    for read_only in (False, True):
        with pytest.raises(nosync.NotAStoreError, match="nosync verify --repair"):
            nosync.open(root, read_only=read_only)
    said = repaired(capsys, root)
    assert "key_groups 16" in said[-1]
    found = read_marker(root, Env())
    assert found == right or (catalog == "lost" and found.key_groups == right.key_groups)
    assert keys_of(root) == RIGHT
    assert (harm is remove) == (not list((root / "quarantine").glob("NOSYNC.*")))


@pytest.mark.parametrize("catalog", [True, False])
@pytest.mark.parametrize("harm", [remove, zero, tear])
def test_the_newest_entry_of_the_log(
    open_store: OpenStore, capsys: pytest.CaptureFixture[str], harm: Harm, catalog: bool
) -> None:
    root = filled(open_store)
    right = read_refs(root, Env())
    harm(root / "branches/1.json")
    if not catalog:
        shutil.rmtree(root / "catalog")
    with pytest.raises(nosync.CorruptionError, match="nosync verify --repair"):
        nosync.open(root)
    said = repaired(capsys, root)
    assert "do rewind, name rewind-1, parent main, at 2, keep_as before-rewind-1" in said[-1]
    assert read_refs(root, Env()) == right
    assert keys_of(root) == RIGHT
    assert keys_of(root, "before-rewind-1") == {"a0", "a1", "a2", "a3"}


def test_an_entry_in_the_middle(open_store: OpenStore, capsys: pytest.CaptureFixture[str]) -> None:
    filled(open_store)
    store = open_store(settings=SETTINGS)
    store.node.create_branch("other", "main", 3, ChangedStages(("c",)))
    store.node.create_branch("third", "main", 3)
    store.close()
    root = store.directory.root
    right = read_refs(root, Env())
    tear(root / "branches/2.json")
    assert "create" in repaired(capsys, root)[-1]
    assert read_refs(root, Env()) == right


def test_what_nothing_says_is_not_made_up(open_store: OpenStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the catalog a branch that was made with other code is not known: at the end of the log it is left out."""
    filled(open_store)
    store = open_store(settings=SETTINGS)
    store.node.create_branch("other", "main", 3, ChangedStages(("c",)))
    store.node.create_branch("third", "main", 3)
    store.close()
    root = store.directory.root
    catalog = Catalog(root / "catalog")
    catalog.remember({f"{ENTRY_META}{n}": "" for n in (2, 3)})
    catalog.close()
    tear(root / "branches/2.json")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--repair", "--yes", str(root)])
    assert "nothing says what was in it, and later entries depend on it" in capsys.readouterr().err.replace("\n", " ")
    (root / "branches/3.json").unlink()
    assert "move it to quarantine/ (nothing says what was in it" in repaired(capsys, root)[-1]
    assert keys_of(root) == RIGHT


def test_a_store_that_is_open_is_left_alone(open_store: OpenStore, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(settings=SETTINGS)
    epochs(store, range(1), "a")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--repair", "--yes", str(store.directory.root)])
    assert "is open in process" in capsys.readouterr().err.replace("\n", " ")


def test_nobody_is_asked_who_is_not_there(
    open_store: OpenStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = filled(open_store)
    (root / "NOSYNC").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--repair", str(root)])
    assert "will repair NOSYNC" in capsys.readouterr().out
    assert not (root / "NOSYNC").exists()


def test_what_needs_no_repair_and_what_is_no_store(
    open_store: OpenStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = filled(open_store)
    before = {path: path.read_bytes() for path in root.rglob("*.json")}
    main(["verify", "--repair", "--yes", str(root)])
    assert "nothing to repair" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in root.rglob("*.json")}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--repair", "--yes", str(tmp_path / "other")])
    assert "is not a nosync store" in capsys.readouterr().err.replace("\n", " ")


def test_the_marker_of_a_daemon_whose_catalog_is_lost_is_not_made_up(
    open_store: OpenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    root = filled(open_store)
    (root / "NOSYNC").unlink()
    shutil.rmtree(root / "catalog")
    (root / PLACE_FILE).write_text('"token"')
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--repair", "--yes", str(root)])
    assert "its peers know" in capsys.readouterr().err.replace("\n", " ")
