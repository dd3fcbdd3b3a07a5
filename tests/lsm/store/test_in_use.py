"""What looks at a store while it is written, and what was lost of one."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import nosync
from nosync.cli import main
from nosync.lsm.model.layer import Description
from nosync.lsm.model.timestamp import pack
from nosync.lsm.platform.env import Env, Identity
from nosync.lsm.store import verify as verifying
from nosync.lsm.store.backup import _up_to, backup
from tests.conftest import OpenStore

QUIET = nosync.StoreSettings(background=False, grace_s=0.0)


def epochs(store: nosync.Store, numbers: range) -> None:
    for t in numbers:
        store.append("a", t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
        store.seal(t)
        store.sync()


# --- copies -----------------------------------------------------------------------------------------------------------


def test_what_is_merged_past_the_manifests_is_left_out_where_its_parts_are_there() -> None:
    def layers(*bounds: tuple[int, int]) -> list[Description]:
        return [Description(pack(a), pack(b)) for a, b in bounds]

    whole = layers((0, 2), (2, 4), (4, 5), (0, 8))
    assert _up_to(whole, pack(5)) == whole[:3]
    assert _up_to(layers((0, 2), (4, 5), (0, 8)), pack(5)) == layers((0, 2), (4, 5), (0, 8)), "a part is gone"
    assert _up_to(layers((3, 4), (4, 6)), pack(6)) == layers((3, 4), (4, 6))
    for n in range(1, 6):
        for bounds in itertools.combinations([(a, b) for a in range(4) for b in range(a + 1, 6)], n):
            found = _up_to(layers(*bounds), pack(4))
            covered = {t for d in found for t in range(4) if d.lower <= pack(t) < d.upper}
            assert covered == {t for a, b in bounds for t in range(4) if a <= t < b}, "nothing is lost by leaving out"


def test_a_file_that_goes_in_the_second_pass_is_no_error(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with nosync.open(root, settings=QUIET) as store:
        epochs(store, range(3))

    class Busy(Env):
        """Rolls up the files of times between listing and copying."""

        seen: dict[str, int] = {}  # noqa: RUF012 - of this test

        def identity(self, path: Path) -> Identity:
            n = self.seen[str(path)] = self.seen.get(str(path), 0) + 1
            if path.parent == root / "times/main" and (path.name[:2], n) in (("1-", 1), ("0-", 2)):
                path.unlink()
            return super().identity(path)

    assert backup(root, tmp_path / "copy", Busy()).errors == ()
    with nosync.open(tmp_path / "copy", read_only=True) as copy:
        assert copy.last_sealed() == 2


def test_verify_passes_over_what_was_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nosync.open(tmp_path / "s", settings=QUIET) as store:
        epochs(store, range(3))
    listed = verifying.register_files

    def gone(root: Path, env: Env) -> list[Any]:
        found = list(listed(root, env))
        next((root / "times/main").glob("1-*")).unlink()
        return found

    monkeypatch.setattr(verifying, "register_files", gone)
    with nosync.open(tmp_path / "s", read_only=True) as store:
        assert store.verify().errors == ()


# --- times ------------------------------------------------------------------------------------------------------------


def test_an_epoch_whose_time_was_not_written_yet_is_found_by_time(tmp_path: Path) -> None:
    """The process died right after it had sealed epochs."""
    code = """
import nosync, os, pyarrow as pa, sys
store = nosync.open(sys.argv[1])
for t in range(6):
    store.append("a", t=t, rows=pa.table({"k": [1], "v": [t]}), key=["k"])
    store.seal(t)
    if t == 2:
        store.sync()  # which writes when they were sealed
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False)
    with nosync.open(tmp_path / "s", read_only=True) as store:
        last = store.last_sealed()
        assert last is not None
        assert store.read("a", "2100-01-01").to_pylist() == store.read("a").to_pylist() == [{"k": 1, "v": last}]
        assert store.changes("a", "2000-01-01", "2100-01-01")["_epoch"].to_pylist()[-1] == last


# --- what is lost -----------------------------------------------------------------------------------------------------


def test_a_stage_whose_layers_are_all_gone_takes_no_other_columns(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with nosync.open(root, settings=QUIET) as store:
        epochs(store, range(3))
    shutil.copytree(root / "layers/a", tmp_path / "a")
    shutil.rmtree(root / "layers/a")
    with nosync.open(root, settings=QUIET) as store:
        for call in (
            lambda: store.append("a", t=3, rows=pa.table({"k": ["x"], "w": [1]}), key=["k"]),
            lambda: store.seal(3, fill_missing=True),
        ):
            with pytest.raises(nosync.HoleError, match="no layer of it is left: bring its directory back"):
                call()
    shutil.copytree(tmp_path / "a", root / "layers/a")
    with nosync.open(root, settings=QUIET) as store:
        epochs(store, range(3, 4))


def test_a_store_without_manifests_is_not_emptied(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with nosync.open(root, settings=QUIET) as store:
        epochs(store, range(3))
    for name in ("manifests", "catalog"):
        shutil.rmtree(root / name)
    with nosync.open(root, settings=QUIET) as store, pytest.raises(nosync.LostEpochError, match="was at epoch 2"):
        store.rewind(-1)
    assert [*root.rglob("*.layer")]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_log_has_no_column_that_says_what_changes(open_store: OpenStore) -> None:
    store = open_store()
    for values in (["delete"], [7]):
        with pytest.raises(nosync.SchemaError, match="'_change_type' has a name that nosync uses itself"):
            store.append("l", t=0, rows=pa.table({"x": [1], "_change_type": values}), key=[])


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_a_key_of_bytes_is_found_as_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any) -> None:
    with nosync.open(tmp_path / "s") as store:
        store.append("a", t=0, rows=pa.table({"k": pa.array([b"a"], kind), "v": [1]}), key=["k"])
        store.seal(0)
    main(["get", str(tmp_path / "s"), "a", "--key", "k=YQ==", "--csv"])
    assert capsys.readouterr().out.splitlines()[1:] == ['"YQ==",1']


@pytest.mark.parametrize("key_groups", [1.5, True, "8"])
def test_key_groups_that_are_no_number_make_no_store(tmp_path: Path, key_groups: Any) -> None:
    with pytest.raises(nosync.InvalidInputError, match="expected 1 to"):
        nosync.open(tmp_path / "s", key_groups=key_groups)
    assert not (tmp_path / "s/NOSYNC").exists()


def test_other_types_are_refused(open_store: OpenStore) -> None:
    store = open_store()
    epochs(store, range(3))
    for keep_as in (False, 0, []):
        with pytest.raises(nosync.InvalidInputError, match="expected the name of a branch"):
            store.rewind(1, keep_as=keep_as)  # type: ignore[arg-type]
    assert store.last_sealed() == 2
    for wrong in ({"block_rows": None}, {"grace_s": "1"}, {"merge_process_rows": True}):
        with pytest.raises(nosync.InvalidInputError, match="expected"):
            nosync.StoreSettings(**wrong)  # type: ignore[arg-type]
