"""Real file systems: full, read-only, not writable."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from tests.helpers.small_disks import small_disk
from tests.helpers.stores import words


@pytest.fixture
def four_mebibytes(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4, "the ENOSPC of test_disk_faults.py covers the code") as mount:
        yield mount


def test_a_really_full_disk(four_mebibytes: Path) -> None:
    settings = nosync.StoreSettings(background=False)
    store = nosync.open(four_mebibytes / "s", settings=settings)
    rows = pa.table({"k": range(10_000), "v": range(10_000)})

    def fill() -> None:
        for t in range(1000):
            store.append("kv", t=t, rows=rows, key=["k"])
            store.seal(t)
            store.sync()

    with pytest.raises(nosync.StorageError, match="disk is full"):
        fill()
    safe = store.safe_point()
    assert safe is not None
    for t in range(safe + 1):
        assert store.read("kv", as_of=t).num_rows == 10_000
    subprocess.run(["mount", "-o", "remount,size=64m", str(four_mebibytes)], check=True)
    last = store.last_sealed() or 0
    store.append("kv", t=last + 1, rows=rows)
    store.seal(last + 1)
    store.sync()
    assert store.safe_point() == last + 1
    store.close()


def test_a_read_only_file_system(four_mebibytes: Path) -> None:
    nosync.open(four_mebibytes / "s").close()
    store = nosync.open(four_mebibytes / "s", settings=nosync.StoreSettings(background=False))
    store.append("counts", t=0, rows=words(a=1), key=["word"])
    store.seal(0)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(four_mebibytes)], check=True)
    with pytest.raises(nosync.StorageError, match="read-only"):
        nosync.open(four_mebibytes / "s")
    with nosync.open(four_mebibytes / "s", read_only=True) as reader:
        assert reader.read("counts").num_rows == 1
    subprocess.run(["mount", "-o", "remount,rw", str(four_mebibytes)], check=True)


def test_an_unwritable_directory(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    if os.geteuid() == 0:
        with pytest.raises(nosync.NosyncError):
            nosync.open("/proc/nosync-store")
        return
    parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(nosync.StorageError, match="permission denied"):
        nosync.open(parent / "store")
