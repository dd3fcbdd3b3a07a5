"""The command that writes the state of a stage to a file that other programs read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from rich.markup import escape

from nosync.cli.app import cli
from nosync.cli.console import (
    JSON,
    POINT_IN_TIME,
    STORE,
    GivenPath,
    flat,
    out,
    print_json,
    progress,
    read_only,
    size_text,
    whole_file,
)
from nosync.lsm.errors import InvalidInputError, SchemaError
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.store.store import Store


@cli.command()
@STORE
@click.argument("stage")
@click.argument("target", metavar="FILE", type=GivenPath(dir_okay=False))
@click.option(
    "--as-of", type=POINT_IN_TIME, help="The epoch whose state to write, or a time. [default: the last sealed one]"
)
@click.option("--branch", default="main", show_default=True, help="Which branch to read.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@JSON
def export(path: Path, stage: str, target: Path, as_of: AsOf | None, branch: str, force: bool, as_json: bool) -> None:
    """Write the state of STAGE as of any epoch to FILE: Parquet or CSV, as its suffix says.

    FILE is there whole or not at all. CSV has JSON text for nested values, and base64 for binary ones.

    \b
      nosync export state/ delays delays.parquet
      nosync export state/ delays delays.csv --as-of 2026-07-04
    """
    is_csv = _is_csv(target)
    if target.exists() and not force:
        raise InvalidInputError(f"{target} is there: give another name, or say --force to replace it")
    with read_only(path) as store, store.held():
        t = store.newest(branch) if as_of is None else store.epoch_as_of(as_of, branch)
        if t is None:
            raise InvalidInputError(f"branch {branch} has no sealed epoch: there is nothing to export")
        with progress("writing", quiet=as_json) as advance:
            rows = _export(store, stage, t, branch, target, lambda done, of: advance(done, of, "shards"),
                           is_csv=is_csv, force=force)  # fmt: skip
    size = target.stat().st_size
    if as_json:
        print_json({"file": str(target), "stage": stage, "epoch": t, "rows": rows, "bytes": size})
    else:
        out.print(
            f"wrote {rows:,} rows of stage {escape(stage)} as of epoch {t} to {escape(str(target))} ({size_text(size)})"
        )


def _is_csv(target: Path) -> bool:
    suffix = target.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise InvalidInputError(
            f"{target}: its suffix says no format that can be written; give a name in .parquet or .csv"
        )
    return suffix == ".csv"


def _export(
    store: Store,
    stage: str,
    t: int,
    branch: str,
    target: Path,
    progress: Callable[[int, int], None],
    *,
    is_csv: bool,
    force: bool,
) -> int:
    """Writes a stage shard by shard, so that no more than one is in memory. Returns the number of rows."""
    schema, rows = store.schema(stage, t, branch=branch), 0
    shown = flat(schema.empty_table()).schema if is_csv else schema
    shards = store.parts(stage, t, branch=branch)
    with whole_file(target, force=force) as temporary, _writer(temporary, stage, shown, is_csv=is_csv) as writer:
        for done, shard in enumerate(shards):
            progress(done, len(shards))
            table = store.read(stage, t, shard=shard, branch=branch)
            # Where the caller places keys, a shard may lack columns that others have.
            table = pa.concat_tables([schema.empty_table(), table], promote_options="default")
            writer.write_table(flat(table) if is_csv else table)
            rows += table.num_rows
        progress(len(shards), len(shards))
    return rows


@contextlib.contextmanager
def _writer(path: Path, stage: str, schema: pa.Schema, *, is_csv: bool) -> Iterator[Any]:
    """Gives the writer of a format. Raises SchemaError for a column that the format does not have."""
    try:
        # Arrow takes no name that is not UTF-8, but a file.
        with open(path, "wb") as file:
            writer: Any = pyarrow.csv.CSVWriter(file, schema) if is_csv else pyarrow.parquet.ParquetWriter(file, schema)
            with writer:
                yield writer
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        kind = "CSV" if is_csv else "Parquet"
        raise SchemaError(f"stage {stage} cannot be written as {kind}: {str(error).splitlines()[0]}") from error
