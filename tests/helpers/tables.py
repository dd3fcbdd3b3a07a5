"""What sinks write: Delta tables here and in an object store, tables of SQLite and of a PostgreSQL that a test starts,
Parquet files in an object store.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from nosync.replication.remote.cloud import open_bucket

TABLES = ["delta", "delta-s3", "iceberg", "sqlite", "postgres"]
KINDS = [*TABLES, "parquet-s3"]
Rows = list[tuple[Any, ...]]


class Output:
    """The output of one sink. `sink()` makes a sink for it, as each job does."""

    def __init__(self, kind: str, root: Path, server: str | None = None) -> None:
        """`server`: the URL of the database or of the object store, where the kind needs one."""
        self.kind, self.path = kind, root / "table"
        self.url = server if server is not None else f"sqlite:///{root / 'tables.db'}"

    def sink(self) -> Any:
        if self.kind.startswith("parquet"):
            return nosync.ParquetSink(self.place)
        if self.kind == "iceberg":
            return nosync.IcebergSink("shop.sums", "tests", self.catalog)
        return nosync.DeltaSink(self.place) if self.kind.startswith("delta") else nosync.SqlSink(self.url, "sums")

    @property
    def catalog(self) -> dict[str, str]:
        """Returns what is said of the catalog of an Iceberg table."""
        root = self.path.parent
        return {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/warehouse"}

    @property
    def place(self) -> str:
        """Returns where a Delta table or Parquet files are."""
        return str(self.path) if self.kind in ("delta", "parquet") else f"{self.url}/{self._prefix}"

    @property
    def _prefix(self) -> str:
        return self.path.parent.name

    def rows(self, *columns: str) -> Rows:
        """Returns what readers see, in order of epochs."""
        return sorted((tuple(row[name] for name in columns) for row in self._all()), key=repr)

    def _all(self) -> list[dict[str, Any]]:
        if self.kind == "parquet":
            return [
                row for path in self.path.glob("epoch=*/*.parquet") for row in pq.ParquetFile(path).read().to_pylist()
            ]
        if self.kind == "parquet-s3":
            bucket = open_bucket(self.place)
            names = [one.name for one in bucket.list("") if one.name.endswith(".parquet")]
            return [row for name in names for row in pq.read_table(pa.BufferReader(bucket.get(name))).to_pylist()]
        if self.kind == "iceberg":
            return self.iceberg().load_table("shop.sums").scan().to_arrow().to_pylist()  # type: ignore[no-any-return]
        if self.kind.startswith("delta"):
            from deltalake import DeltaTable

            return DeltaTable(self.place, storage_options=self.sink()._options).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]
        import sqlalchemy as sa

        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            return [dict(row) for row in connection.execute(sa.text("SELECT * FROM sums")).mappings()]

    def iceberg(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("tests", **self.catalog)

    def drop(self) -> None:
        """Removes a table that an earlier test left."""
        if self.kind == "postgres":
            import sqlalchemy as sa

            with sa.create_engine(self.url, poolclass=sa.NullPool).begin() as connection:
                connection.execute(sa.text("DROP TABLE IF EXISTS sums, nosync_outputs"))


@contextmanager
def postgres() -> Iterator[str]:
    """Runs a PostgreSQL on a socket of its own. Skips where there is none. Yields its URL."""
    found = shutil.which("initdb") or next(iter(sorted(glob("/usr/lib/postgresql/*/bin/initdb"), reverse=True)), None)
    if found is None:
        pytest.skip("there is no PostgreSQL here (initdb)")
    is_root = os.getuid() == 0
    if is_root and "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    who: dict[str, Any] = {"user": "postgres"} if is_root else {}
    root = Path(tempfile.mkdtemp(prefix="nosync-pg-"))
    try:
        if is_root:
            shutil.chown(root, "postgres")
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": root, **who}
        data, binaries = root / "data", Path(found).parent
        subprocess.run(
            [found, "-D", data, "-U", "tester", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"],
            check=True,
            **quiet,
        )
        control = [binaries / "pg_ctl", "-D", data, "-w", "-t", "60"]
        options = f"-k {root} -c listen_addresses='' -c fsync=off"
        subprocess.run([*control, "-o", options, "-l", root / "log", "start"], check=True, **quiet)
        try:
            yield f"postgresql+psycopg://tester@/postgres?host={root}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, **quiet)
    finally:
        shutil.rmtree(root, ignore_errors=True)
