"""Commands that look at a store and change nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from rich.markup import escape

import nosync
from nosync.cli.app import cli
from nosync.cli.console import (
    ALONE,
    JSON,
    MOST_ROWS_SHOWN,
    POINT_IN_TIME,
    STORE,
    GivenPath,
    by_key,
    check_formats,
    check_store,
    out,
    parse_keys,
    print_json,
    print_rows,
    progress,
    read_only,
    show_layers,
    size_text,
    table_of,
    whole_file,
)
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError, NotAvailableError
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.model.timestamp import pack
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.lsm.store.store import Store


@cli.command()
@STORE
@click.option("--stage", help="Only this stage.")
@JSON
def layers(path: Path, stage: str | None, as_json: bool) -> None:
    """List the layer files: the stage, shard, epochs and branches of each, its size, level and digest."""
    with read_only(path) as store:
        if stage is not None:
            store.directory.check_stage(stage)
        found = [layer for layer in store.layers() if stage is None or layer.stage == stage]
        branches = store.branches_of(found)
    if as_json:
        print_json(
            [dataclasses.asdict(layer) | {"branches": names} for layer, names in zip(found, branches, strict=True)]
        )
    else:
        show_layers(found, branches)


@cli.command()
@STORE
@click.argument("stage")
@click.option("--as-of", type=POINT_IN_TIME, help="The epoch whose state to read, or a time, in UTC unless it says its zone: "
              "the last epoch sealed by then. [default: the last sealed one]")  # fmt: skip
@click.option("--key", "keys", multiple=True, metavar="COLUMN=VALUE",
              help="Only this key. Once for each key column, in order; the first ones alone select a prefix.")  # fmt: skip
@click.option("--columns", help="Columns to show, separated by commas.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Rows to show. [default: {MOST_ROWS_SHOWN} in a table, else all]"
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--branch", default="main", show_default=True, help="Which branch to read.")
@JSON
def get(
    path: Path, stage: str, as_of: AsOf | None, keys: Sequence[str], columns: str | None, limit: int | None,
    as_csv: bool, branch: str, as_json: bool,
) -> None:  # fmt: skip
    """Read the state of STAGE as of any epoch, or a single key of it. Rows come in order of their key.

    \b
      nosync get state/ delays --as-of 26
      nosync get state/ delays --as-of 2026-07-04T12:00
      nosync get state/ delays --key origin=JFK --csv
    """
    check_formats(as_csv=as_csv, as_json=as_json)
    with read_only(path) as store:
        wanted = [column.strip() for column in columns.split(",") if column.strip()] if columns else None
        if wanted == []:
            raise InvalidInputError(f"--columns {columns!r} names no column: give names, separated by commas")
        if wanted is not None and len(set(wanted)) < len(wanted):
            raise InvalidInputError(f"--columns {columns}: a column is given twice")
        prefix = parse_keys(store, stage, as_of, keys, branch)
        key = store.key(stage, as_of, branch=branch)
        asked = wanted if wanted is None else [*wanted, *(name for name in key if name not in wanted)]
        table = by_key(store.read(stage, as_of, columns=asked, prefix=prefix, branch=branch), key)
        table = table if wanted is None else table.select(wanted)
    print_rows(table, limit, as_csv=as_csv, as_json=as_json)


@cli.command()
@STORE
@click.argument("stage")
@click.option("--from", "begin", type=POINT_IN_TIME, help="The first epoch to show; or a time: those sealed after it. "
              "[default: the oldest that is kept, or the first after STAGE got other columns]")  # fmt: skip
@click.option("--to", "end", type=POINT_IN_TIME, help="The last epoch to show, or a time: those sealed by then. "
              "[default: the last sealed one]")  # fmt: skip
@click.option("--key", "keys", multiple=True, metavar="COLUMN=VALUE", help="Only rows with this value of a column.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Rows to show. [default: {MOST_ROWS_SHOWN} in a table, else all]"
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--include-expired", is_flag=True, help="Show rows that expired, too, as `expire`.")
@click.option("--branch", default="main", show_default=True, help="Which branch to read.")
@JSON
def changes(
    path: Path, stage: str, begin: AsOf | None, end: AsOf | None, keys: Sequence[str], limit: int | None, as_csv: bool,
    include_expired: bool, branch: str, as_json: bool,
) -> None:  # fmt: skip
    """Show what each epoch changed in STAGE: rows with _change_type and _epoch, in order of epoch and key.

    \b
      nosync changes state/ delays --from 20 --to 26
      nosync changes state/ delays --from 2026-07-04 --to 2026-07-05 --key origin=JFK
    """
    check_formats(as_csv=as_csv, as_json=as_json)
    with read_only(path) as store, store.held():
        until = store.newest(branch) if end is None else store.epoch_as_of(end, branch)
        if until is None:
            raise NotAvailableError(f"branch {branch} has no sealed epoch: nothing changed yet")
        after = _after(store, stage, begin, until, branch)
        table = store.changes(stage, after, until, branch=branch, include_expired=include_expired)
        wanted = parse_keys(store, stage, until, keys, branch) or {}
        key = store.key(stage, until, branch=branch)
    for name, value in wanted.items():
        column = table.column(name)
        is_nan = isinstance(value, float) and math.isnan(value)
        table = table.filter(pc.is_nan(column) if is_nan else pc.equal(column, pa.scalar(value, column.type)))
    table = by_key(table, [EPOCH_COLUMN, *(name for name in key if name in table.column_names)])
    print_rows(table, limit, as_csv=as_csv, as_json=as_json)


def _after(store: Store, stage: str, begin: AsOf | None, until: int, branch: str) -> AsOf:
    """Returns what `Store.changes` takes as its beginning, which is an epoch before the first whose changes it gives."""
    if begin is None:
        since, replaced = store.since(), store.replaced_from(stage, branch)
        if replaced is not None and replaced <= until:
            since = max(since, replaced)
        return since if since else BEFORE_FIRST_EPOCH
    if isinstance(begin, int):
        pack(begin)
        if begin > until:
            raise InvalidInputError(f"--from {begin} must not be after epoch {until}, where the changes end")
        return begin - 1
    return store.range_of(begin, store.newest(branch) or 0, branch)[0]


@cli.command()
@STORE
@click.argument("stage")
@click.argument("a")
@click.argument("b")
@click.option("--as-of", type=POINT_IN_TIME, help="The epoch to compare at, or a time, which is looked up on A. "
              "[default: the newest that both branches have]")  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Rows to show. [default: {MOST_ROWS_SHOWN} in a table, else all]"
)
@click.option("--html", type=GivenPath(dir_okay=False),
              help="Write a page with plots and tables to this file instead.")  # fmt: skip
@JSON
def diff(
    path: Path, stage: str, a: str, b: str, as_of: AsOf | None, limit: int | None, html: Path | None, as_json: bool
) -> None:
    """Compare STAGE on branch A with the same stage on branch B: the keys whose rows differ.

    Of a stage without a key, the rows that one branch has more often.

    \b
      nosync diff state/ delays main no-weather --as-of 26
      nosync diff state/ delays main no-weather --html report.html
    """
    if html is not None:
        if limit is not None:
            raise click.UsageError("--limit is for rows: the page of --html shows what it has room for")
        _write_page(path, stage, a, b, as_of, html, as_json=as_json)
        return
    with read_only(path) as store:
        table = store.diff(stage, a, b, as_of)
        is_keyed = any(store.key(stage, as_of, branch=branch) for branch in (a, b))
    table = by_key(table, table.column_names[: table.column_names.index("_diff")])
    if not as_json:
        kinds = table.column("_diff").to_pylist()
        texts = _DIFF_KINDS if is_keyed else _DIFF_KINDS | {"changed": "rows more often in one"}
        found = ", ".join(f"{kinds.count(kind):,} {text}" for kind, text in texts.items())
        out.print(f"{found} of stage {escape(stage)}, {escape(a)} (a) beside {escape(b)} (b)")
    if as_json or table.num_rows:
        print_rows(table, limit, as_csv=False, as_json=as_json)


def _write_page(path: Path, stage: str, a: str, b: str, as_of: AsOf | None, html: Path, *, as_json: bool) -> None:
    from nosync.html_diff.page import diff_page  # noqa: PLC0415 - matplotlib takes a second to import

    if html.exists() and html.suffix.lower() not in _PAGES:
        raise InvalidInputError(f"{html} is there, and is no page by its name: give another name, such as {html}.html")
    with read_only(path) as store, progress("comparing", quiet=as_json) as advance:
        page = diff_page(store, stage, a, b, as_of, progress=lambda done, of: advance(done, of, ""))
    with whole_file(html, force=True) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if as_json:
        print_json({"html": str(html), "bytes": html.stat().st_size})
    else:
        out.print(f"wrote {escape(str(html))} ({size_text(html.stat().st_size)}): open it in any browser")


_PAGES = (".html", ".htm")
"""Pages are often made again; a file of another kind is not replaced."""
_DIFF_KINDS = {"changed": "keys changed", "only_a": "only in a", "only_b": "only in b"}


@cli.command()
@STORE
@click.argument("name", required=False)
@click.option("--delete", is_flag=True, help="Delete the branch NAME, with the layers that nothing else needs.")
@ALONE
@JSON
def branch(path: Path, name: str | None, delete: bool, alone: bool, as_json: bool) -> None:
    """List the branches of a store, describe one, or delete one.

    Jobs make branches: job.branch("name", at=26, replace={...}).

    \b
      nosync branch state/                         list
      nosync branch state/ no-weather              where it comes from, what is shared and what is its own
      nosync branch state/ no-weather --delete
    """
    if delete:
        if name is None:
            raise click.UsageError("--delete needs the NAME of a branch")
        check_store(path)
        with nosync.open(path, alone=alone) as store:
            layers = store.delete_branch(name)
        if as_json:
            print_json({"deleted": name, "layers": layers})
        else:
            out.print(f"deleted branch {escape(name)} and {layers:,} layers")
        return
    with read_only(path) as store, store.held():
        found = [store.describe_branch(n) for n in (store.branches() if name is None else [name])]
    if as_json:
        print_json([dataclasses.asdict(info) for info in found])
        return
    table = table_of("branch", "from", "epoch>", "own layers>", "own>", "shared>", "stages with other code")
    for info in found:
        shown = [info.name, ", ".join(info.lineage), str(info.epoch), f"{info.own_layers:,}", size_text(info.own_bytes),
                 size_text(info.shared_bytes), ", ".join(info.changed)]  # fmt: skip
        table.add_row(*shown)
    out.print(table)
