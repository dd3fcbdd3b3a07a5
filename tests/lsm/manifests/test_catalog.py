"""What the catalog asks of its database: edits that remove are durable, and only who asked for one waits for the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nosync.lsm.errors import StorageError
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.model.layer import Description, Digest, LayerId, Record, Shard, TraceId


class Recording:
    """The database, and what it was asked to write and to sync, in order."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.calls: list[str] = []
        self.fails: Exception | None = None

    def write(self, batch: Any, write_opt: Any = None) -> None:
        is_synced = write_opt is not None and write_opt.sync
        self.calls.append("write that keeps the interpreter's lock until the disk has it" if is_synced else "write")
        self._db.write(batch, write_opt=write_opt)

    def flush_wal(self, sync: bool) -> None:
        if self.fails is not None:
            raise self.fails
        self.calls.append("sync" if sync else "flush")
        self._db.flush_wal(sync)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog")
    yield catalog
    catalog.close()


@pytest.fixture
def asked(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording(catalog._db)
    monkeypatch.setattr(catalog, "_db", recording)
    return recording


def record(t: int) -> Record:
    return Record(LayerId(TraceId("sums", "raw", Shard(0)), Description.of_epoch(t)), Digest("ab" * 32), t, 10 * t)


def test_an_edit_that_only_adds_waits_for_no_disk(catalog: Catalog, asked: Recording) -> None:
    catalog.apply(add=[record(0), record(1)])
    assert asked.calls == ["write"]
    assert catalog.records() == [record(0), record(1)]


@pytest.mark.parametrize(
    "edit",
    [{"remove": [record(0).id]}, {"add": [record(2)], "remove": [record(0).id]}, {"meta": {"store_id": "s"}}],
    ids=["removes", "replaces", "meta"],
)
def test_an_edit_that_must_last_is_synced_while_other_threads_run(
    catalog: Catalog, asked: Recording, edit: dict[str, Any]
) -> None:
    """Files are deleted after it: a power cut could bring their records back otherwise, and they would count as lost."""
    catalog.apply(add=[record(0), record(1)])
    asked.calls.clear()
    catalog.apply(**edit | {"remove": iter(edit.get("remove", []))})
    assert asked.calls == ["write", "sync"]


def test_a_disk_that_refuses_to_sync_is_told_of(catalog: Catalog, asked: Recording) -> None:
    catalog.apply(add=[record(0)])
    asked.fails = Exception("IO error: No space left on device: While fdatasync")
    with pytest.raises(StorageError, match="cannot write the catalog .*No space left on device.*free space"):
        catalog.apply(remove=[record(0).id])
