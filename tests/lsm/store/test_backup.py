"""`nosync backup`: a copy of a store in use is whole, whatever happens to the store meanwhile."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.store.backup import backup
from tests.checkpoints.fake_query import FakeQuery
from tests.conftest import OpenStore
from tests.helpers.checkpoints import contents

SETTINGS = nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0, archive_epochs=2)


def epochs(store: nosync.Store, numbers: range, mark: str = "a") -> None:
    for t in numbers:
        store.append("c", t=t, rows=pa.table({"k": [f"{mark}{t}"]}), key=["k"])
        store.seal(t)
    store.sync()


def keys_of(store: nosync.Store, **options: str) -> set[str]:
    return set(store.read("c", **options).column("k").to_pylist())  # type: ignore[arg-type]


class Meanwhile(Env):
    """Does something to the store just before the n-th file is looked at to be copied."""

    def __init__(self, n: int, change: Callable[[], None]) -> None:
        self._n, self._change, self._seen = n, change, 0

    def identity(self, path: Path) -> Identity:
        self._seen += 1
        if self._seen == self._n:
            self._change()
        return super().identity(path)


def go_on(store: nosync.Store) -> None:
    epochs(store, range(6, 8))


def merge(store: nosync.Store) -> None:
    epochs(store, range(6, 8))
    store.compact()


def archive(store: nosync.Store) -> None:
    epochs(store, range(6, 8))
    assert isinstance(store.node, Node)
    for _ in range(3):
        store.node.archive_manifests()


def rewind(store: nosync.Store) -> None:
    store.rewind(3)
    epochs(store, range(4, 6), "b")


def rewind_and_drop(store: nosync.Store) -> None:
    store.rewind(3, "")
    epochs(store, range(4, 6), "b")


def pin(store: nosync.Store) -> None:
    epochs(store, range(6, 7))
    store.pin("p", 6)


@pytest.mark.parametrize("change", [go_on, merge, archive, rewind, rewind_and_drop, pin])
def test_whatever_happens_meanwhile(
    open_store: OpenStore, tmp_path: Path, change: Callable[[nosync.Store], None]
) -> None:
    """At many moments of copying: n is the file before which it does."""
    for n in itertools.count(1, 4):
        store = open_store(f"store{n}", settings=SETTINGS)
        epochs(store, range(6))
        before = keys_of(store)
        env = Meanwhile(n, lambda store=store: change(store))  # type: ignore[misc]
        target = tmp_path / f"copy{n}"
        backup(store.directory.root, target, env)
        if env._seen < n:
            break
        after = keys_of(store)
        for read_only in (True, False):
            with nosync.open(target, **({"read_only": True} if read_only else {"settings": SETTINGS})) as copy:
                assert copy.verify().ok, copy.verify().errors
                found = keys_of(copy)
                assert found == before or before - found < before - after or found <= after, (n, found)
                assert not copy.status().problems
                last = copy.last_sealed()
                assert last is not None
                if read_only is False:
                    assert copy.safe_point() == last
        shutil.rmtree(target)
        store.close()
    assert n > 10


def test_an_epoch_that_is_being_written_is_left_out(open_store: OpenStore, tmp_path: Path) -> None:
    """So the copy can be given other rows."""
    store = open_store(settings=SETTINGS)
    epochs(store, range(2))
    store.append("c", t=2, rows=pa.table({"k": ["x"]}))
    backup(store.directory.root, tmp_path / "copy")
    with nosync.open(tmp_path / "copy", settings=SETTINGS) as copy:
        epochs(copy, range(2, 3), "other")
        assert keys_of(copy) == {"a0", "a1", "other2"}


def test_a_store_that_is_not_whole_is_not_copied(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(settings=SETTINGS)
    epochs(store, range(4))
    store.close()
    root = store.directory.root
    layer = next(root.rglob("*.layer"))
    whole = layer.read_bytes()
    for bad in (b"", whole[:200] + b"\x00\xff" + whole[202:], None):
        layer.unlink() if bad is None else layer.write_bytes(bad)
        with pytest.raises(nosync.CorruptionError, match="not whole|cannot be copied whole"):
            backup(root, tmp_path / f"copy{bad and len(bad)}")
    for copy in tmp_path.glob("copy*"):
        with pytest.raises(nosync.NotAStoreError):
            nosync.open(copy)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_copy_that_failed_leaves_nothing(open_store: OpenStore, tmp_path: Path, is_there: bool) -> None:
    """So it can be said again."""
    store, target = open_store(settings=SETTINGS), tmp_path / "copy"
    epochs(store, range(3))
    if is_there:
        target.mkdir()

    def fails(files: int) -> None:
        if files == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(store.directory.root, target, progress=fails)
    assert target.exists() == is_there
    assert not is_there or not any(target.iterdir())
    (target / "layers").mkdir(parents=True)
    with pytest.raises(nosync.InvalidInputError, match="it is a copy that was killed: remove it"):
        backup(store.directory.root, target)
    shutil.rmtree(target)
    backup(store.directory.root, target)
    with nosync.open(target, read_only=True) as copy:
        assert copy.last_sealed() == 2


def test_kept_checkpoints_come_along(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(settings=SETTINGS)
    epochs(store, range(1))
    query = FakeQuery(tmp_path / "words", "changelog")
    query.run(3)
    with nosync.checkpoints.watch(query.root, store.directory.root):
        pass
    nosync.checkpoint("words", store.directory.root).pin("before", 1)
    (store.directory.root / "checkpoints" / "words" / "commits" / "9").symlink_to("/etc/passwd")
    backup(store.directory.root, tmp_path / "copy")
    found = nosync.checkpoint("words", tmp_path / "copy")
    assert found.status().safe == 2
    assert [pin.name for pin in found.pins()] == ["before"]
    assert contents(tmp_path / "copy/checkpoints/words") == contents(store.directory.root / "checkpoints/words")
    assert not (tmp_path / "copy/checkpoints/words/commits/9").exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_a_copy_is_for_its_owner_and_group_alone_whatever_the_umask(
    open_store: OpenStore, tmp_path: Path, umask: int
) -> None:
    store = open_store(settings=SETTINGS)
    epochs(store, range(2))
    query = FakeQuery(tmp_path / "words", "hdfs")
    query.run(2)
    with nosync.checkpoints.watch(query.root, store.directory.root):
        pass
    (tmp_path / "copy").mkdir()
    before = os.umask(umask)
    try:
        backup(store.directory.root, tmp_path / "copy")
    finally:
        os.umask(before)
    modes = {oct(stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "copy").rglob("*")}
    assert modes <= {"0o750", "0o640", "0o440", "0o700", "0o600"}, modes
    assert any((tmp_path / "copy" / "checkpoints" / "words").rglob("*"))


def test_the_command(open_store: OpenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(settings=SETTINGS)
    epochs(store, range(3))
    main(["backup", str(store.directory.root), str(tmp_path / "copy"), "--json"])
    assert json.loads(capsys.readouterr().out)["epoch"] == 2
    main(["backup", str(store.directory.root), str(tmp_path / "again")])
    assert "copied up to epoch 2" in capsys.readouterr().out
    for target, error in ((tmp_path / "copy", "not empty"), (store.directory.root / "inside", "lies in the store")):
        with pytest.raises(SystemExit, match="1"):
            main(["backup", str(store.directory.root), str(target)])
        assert error in capsys.readouterr().err.replace("\n", " ")


def test_a_whole_layer_that_its_epoch_does_not_list_is_told(open_store: OpenStore, tmp_path: Path) -> None:
    """As another copy of the store has it."""
    store, other = open_store("a", settings=SETTINGS), open_store("b", settings=SETTINGS)
    for t in range(3):
        for one, value in ((store, t), (other, t + 100)):
            one.append("counts", t=t, rows=pa.table({"k": [1], "v": [value]}), key=["k"])
            one.seal(t)
    manifest = store.manifest(2)
    assert manifest is not None
    id = manifest.entries[0].id
    store.sync()
    store.close()
    shutil.copyfile(other.directory.path_of(id), store.directory.path_of(id))
    with nosync.open(tmp_path / "a", read_only=True) as found:
        (error,) = found.verify().errors
        assert "epoch 2 of main lists" in error
    with pytest.raises(nosync.CorruptionError, match="the copy is not whole: .*epoch 2 of main lists"):
        backup(tmp_path / "a", tmp_path / "copy")


@pytest.mark.parametrize("name", ["manifests/main/007.json", "manifests/main/2", "branches/01.json", "branches/README"])
def test_a_stray_file_that_is_named_like_one_of_a_stores_is_passed_over(
    open_store: OpenStore, tmp_path: Path, name: str
) -> None:
    store = open_store(settings=SETTINGS)
    epochs(store, range(3))
    store.node.create_branch("b", "main", 1)
    store.sync()
    store.close()
    root = store.directory.root
    (root / name).write_text("hello")
    store = open_store(settings=SETTINGS)
    epochs(store, range(3, 5))
    assert (store.safe_point(), store.status().problems, store.verify().errors) == (4, {}, ())
    store.close()
    backup(root, tmp_path / "copy")
    with nosync.open(tmp_path / "copy", read_only=True) as copy:
        assert sorted(copy.branches()) == ["b", "main"]
