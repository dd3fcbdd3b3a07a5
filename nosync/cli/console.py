"""What commands share: the screen, tables, progress, and options that they all have."""

from __future__ import annotations

import base64
import decimal
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

import nosync
from nosync.lsm.columnar.types import has_part
from nosync.lsm.errors import InvalidInputError, StorageError
from nosync.lsm.model.as_of import AsOf, parse_as_of
from nosync.lsm.model.layer import Shard
from nosync.lsm.status import LayerStatus
from nosync.lsm.store.store import Store
from nosync.lsm.visible import visible
from nosync.stores import open_to_read

PLAIN_WIDTH = 140
"""Columns of output that goes to a file or a pipe, where there is no terminal to fit into."""


class Screen(Console):
    """Prints. Where a reader such as `head` has seen enough, that is no failure: `main` ends with 0."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Makes all visible that is printed: nothing acts on the terminal but what this process does to it."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text, keep="\n"), style, control)


class VisibleFormatter(logging.Formatter):
    """Formats what goes to the log on standard error, which names what others wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep="\n\t")


def log_to_stderr(level: int, format: str, *, force: bool = False) -> None:
    """Has everything of a level and above written to standard error. `force`: and to nothing else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter(format))
    logging.basicConfig(level=level, handlers=[handler], force=force)


class PlainTable(Table):
    """Shows cells as the texts that they are: nothing in them is markup, and no line break looks like another row."""

    def add_column(self, header: RenderableType = "", *args: Any, **options: Any) -> None:
        super().add_column(_plain(header), *args, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_plain, cells), **options)


def _plain(cell: Any) -> Any:
    return Text(visible(cell)) if isinstance(cell, str) else cell


for _name in ("stdout", "stderr"):
    if getattr(sys, _name) is None:  # whoever started this has closed it
        setattr(sys, _name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as this process runs
out = Screen(highlight=False, emoji=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Screen(stderr=True, highlight=False, emoji=False)


class GivenPath(click.Path):
    """Takes a path, as a `Path`. An empty one is refused: where a variable of the shell is not set, it would be the
    working directory.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: give the path of a directory or file; '.' is the working directory", param, ctx)
        return super().convert(value, param, ctx)


class PointInTime(click.ParamType):  # type: ignore[type-arg]
    """Takes the number of an epoch, or a time of the wall clock."""

    name = "epoch or time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        try:
            return parse_as_of(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


POINT_IN_TIME = PointInTime()
STORE = click.argument("path", metavar="PATH", type=GivenPath())
ALONE = click.option("--alone", is_flag=True, help="Work without the directory's daemon, which must be stopped.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
MOST_ROWS_SHOWN = 50
_LEAST_SHOWN, _FIRST_SHORTENED = 1e-6, 1e21
"""Between them a number is written out, as in JavaScript; others have an exponent."""
_ADDRESS = re.compile(r"[^/]+:[0-9]{1,5}\Z")
_OFFSET = re.compile(r"(Z|[+-]\d{2}(:?\d{2})?)\s*\Z", re.IGNORECASE)
"""How a time ends that says its zone."""
_COLLAPSED_URL = re.compile(r"(s3|gs|az|memory|file):/+([^/].*)\Z")
"""What `Path` makes of a URL."""


def fail(message: str, code: int) -> None:
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    sys.exit(code)


def print_json(value: Any) -> None:
    # JSON escapes what acts on a terminal but for DEL.
    click.echo(json.dumps(_for_json(value), indent=2, default=str, allow_nan=False).replace("\x7f", "\\u007f"))


def json_text(value: Any) -> str:
    """Returns one value as `print_json` prints it."""
    return json.dumps(_for_json(value), default=str, allow_nan=False)


def head(rows: pa.Table, limit: int) -> pa.Table:
    return rows.slice(0, min(limit, rows.num_rows))


def _for_json(value: Any) -> Any:
    """Returns the value with texts for what JSON does not have: NaN, infinities, and bytes, which Spark's to_json
    writes in the same way.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: _for_json(one) for key, one in value.items()}
    return [_for_json(one) for one in value] if isinstance(value, list | tuple) else value


def confirmed(question: str) -> bool:
    """Asks on the terminal. Raises UsageError where nobody is there."""
    if not sys.stdin.isatty():
        raise click.UsageError("nothing was done: there is nobody to ask; say --yes")
    return click.confirm(question)


def read_only(path: Path) -> Store:
    """Opens a store to look at: one in a directory, that of the daemon at HOST:PORT, or copies in an object store."""
    if (url := _url_of(path)) is not None:
        return open_to_read(url)
    return open_to_read(str(path)) if _ADDRESS.match(str(path)) else nosync.open(path, read_only=True)


def _url_of(path: Path) -> str | None:
    """Returns the URL that a path was given as; None for one that is a path."""
    found = _COLLAPSED_URL.match(str(path))
    if found is None:
        return None
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"


def check_store(path: Path) -> None:
    """Raises before a command changes a store that is missing, which would make a new one, or that is on another host."""
    if _ADDRESS.match(str(path)) and not path.exists():
        raise InvalidInputError(
            f"{path} is a daemon's address; this command needs the store's directory: run it on the daemon's host, with the "
            "directory that the daemon was started with (nosync status shows it)"
        )
    if (url := _url_of(path)) is not None:
        raise InvalidInputError(
            f"{url} are copies, which are only read; this command needs the store's directory: run it there, or make one, "
            f"nosync restore {url} DIR"
        )
    read_only(path).close()


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Shows a bar on standard error, which `advance(done, of, note)` moves."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(text, total=None, note="")
        yield lambda done, of, note: bar.update(task, completed=done, total=of, note=note)


@contextmanager
def whole_file(target: Path, *, force: bool) -> Iterator[Path]:
    """Gives a file beside the target, which takes its name once it is whole. Raises InvalidInputError or StorageError."""
    if not target.parent.is_dir():
        raise InvalidInputError(f"{target}: there is no directory {target.parent}: make it first")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if force:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)
    except FileExistsError:
        raise InvalidInputError(f"{target} came meanwhile: give another name, or say --force to replace it") from None
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def table_of(*columns: str) -> Table:
    """Returns a table. Columns whose name ends in > are right-aligned."""
    return _table([(column.removesuffix(">"), column.endswith(">")) for column in columns])


def _table(columns: Iterable[tuple[str, bool]]) -> Table:
    """Returns a table. `columns`: their names, as they are, and whether they are right-aligned."""
    table = PlainTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, is_right in columns:
        table.add_column(name, justify="right" if is_right else "left", overflow="fold")
    return table


def size_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_keys(store: Store, stage: str, as_of: AsOf | None, keys: Sequence[str], branch: str) -> dict[str, Any] | None:
    if not keys:
        return None
    schema = store.schema(stage, as_of, branch=branch)
    prefix = {}
    for text in keys:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInputError(f"--key {text!r} is not COLUMN=VALUE")
        if name not in schema.names:
            raise InvalidInputError(f"--key: stage {stage} has no column {name!r}; it has {', '.join(schema.names)}")
        if name in prefix:
            raise InvalidInputError(f"--key: column {name!r} is given twice")
        prefix[name] = _parsed(value, schema.field(name).type, text)
    return prefix


def _parsed(value: str, type_: pa.DataType, text: str) -> Any:
    """Returns the value of that type which a table shows as this text."""
    is_bytes = pa.types.is_binary(type_) or pa.types.is_large_binary(type_)
    try:
        if is_bytes:
            return base64.b64decode(value, validate=True)
        if pa.types.is_timestamp(type_) and type_.tz is not None:
            value = _with_offset(value)
        return pa.array([value]).cast(type_)[0].as_py()
    except (pa.ArrowException, ValueError) as error:
        what = "text in base64" if is_bytes else f"a {type_}"
        raise InvalidInputError(f"--key {text!r}: {value!r} is not {what}: {error}") from error


def _with_offset(time: str) -> str:
    """Returns a time with its zone: UTC where it says none, as --as-of takes it. A date is its first moment."""
    time = time.strip()
    if len(time) <= len("2026-01-01"):
        time += " 00:00:00"
    return time if _OFFSET.search(time) else f"{time}+00:00"


def show_layers(found: Sequence[LayerStatus], branches: Sequence[tuple[str, ...]]) -> None:
    """Prints a table of layers. `branches`: for each layer those whose epochs it holds."""
    columns = ("stage", "shard", "epochs>", "since>", "entries>", "size>", "level", "tree level>", "branch", "digest")
    table = table_of(*columns)
    for layer, names in zip(found, branches, strict=True):
        shard, epochs = str(Shard(layer.shard, layer.shards)), escape(f"[{layer.lower}, {layer.upper})")
        table.add_row(
            layer.stage, shard, epochs, str(layer.since), f"{layer.rows:,}", size_text(layer.bytes), layer.level,
            str(layer.tree_level), ", ".join(names) or "not sealed", layer.digest[:12],
        )  # fmt: skip
    out.print(table if found else "no layers")


def show_rows(rows: pa.Table, of: int) -> None:
    numeric = [
        pa.types.is_integer(f.type) or pa.types.is_floating(f.type) or pa.types.is_decimal(f.type) for f in rows.schema
    ]
    table = _table(zip(rows.column_names, numeric, strict=True))
    for row in zip(*map(values_of, rows.columns), strict=True):
        table.add_row(*map(_cell, row))
    out.print(table)
    if rows.num_rows < of:
        out.print(f"... {of - rows.num_rows:,} more of {of:,} rows")


def by_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Returns the rows in order of their key, nulls first; as they are where there is no key, or no order of such keys."""
    ordered = [
        name
        for name in key
        if not (pa.types.is_nested(type_ := rows.schema.field(name).type) or pa.types.is_null(type_))
    ]
    if not ordered:
        return rows
    # Versions of Arrow differ in how they are told where nulls go: whether there is a value is a key of its own.
    keys = {f"{i} {what}": column for i, name in enumerate(ordered) for what, column in _sort_keys(rows.column(name))}
    return rows.take(pc.sort_indices(pa.table(keys), sort_keys=[(name, "ascending") for name in keys]))


def _sort_keys(column: pa.ChunkedArray) -> list[tuple[str, pa.ChunkedArray]]:
    return [("is there", column.is_valid()), ("value", column)]


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """Returns a column's values as Python has them; those of 32 bits with the digits that they need, 0.1 and not
    0.10000000149011612.
    """
    values = _listed(column)
    return [_short(value, column.type) for value in values] if has_part(column.type, _is_short) else values


def _listed(column: pa.ChunkedArray) -> list[Any]:
    """Returns what `to_pylist` does, but text for dates and times that Python's calendar does not have."""
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        return [_value_of(scalar) for scalar in column]
    return values


def _value_of(scalar: pa.Scalar) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StructScalar):
        return {name: _value_of(value) for name, value in scalar.items()}
    if isinstance(scalar, pa.MapScalar):
        return [(_value_of(entry["key"]), _value_of(entry["value"])) for entry in scalar.values]
    if isinstance(scalar, (pa.ListScalar, pa.LargeListScalar)):
        return [_value_of(value) for value in scalar.values]
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        unit = scalar.type.unit if pa.types.is_timestamp(scalar.type) else "days"
        return f"{scalar.value:,} {unit} since 1970"


def rows_of(rows: pa.Table) -> list[dict[str, Any]]:
    """Returns the rows for `print_json`."""
    twice = next((name for name in rows.column_names if rows.column_names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInputError(
            f"two columns are named {twice!r}, and JSON has one value for a name: give one an alias with AS"
        )
    columns = [values_of(column) for column in rows.columns]
    return [dict(zip(rows.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def flat(table: pa.Table) -> pa.Table:
    """Returns the rows with JSON text for nested values, and base64 for binary ones, which CSV does not have."""
    for i, f in enumerate(table.schema):
        if pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type) or pa.types.is_fixed_size_binary(f.type):
            texts = [
                None if value is None else base64.b64encode(value).decode() for value in table.column(i).to_pylist()
            ]
            table = table.set_column(i, f.name, pa.array(texts, pa.string()))
        if pa.types.is_nested(f.type):
            texts = [None if value is None else json_text(value) for value in _listed(table.column(i))]
            table = table.set_column(i, f.name, pa.array(texts, pa.string()))
    return table


def _is_short(type_: pa.DataType) -> bool:
    return bool(pa.types.is_float32(type_) or pa.types.is_float16(type_))


def _short(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if _is_short(type_):
        return float(str(type_.to_pandas_dtype()(value)))
    if pa.types.is_struct(type_):
        return {name: _short(part, type_.field(name).type) for name, part in value.items()}
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return [_short(part, type_.value_type) for part in value]
    return value


def _number(value: float) -> str:
    """Returns a number as people write it, with all digits that it takes to have the same value again, so that --key
    takes what is shown.
    """
    if not math.isfinite(value):
        return str(_for_json(value))
    is_near = value == 0 or _LEAST_SHOWN <= abs(value) < _FIRST_SHORTENED
    return np.format_float_positional(value, trim="0") if is_near else repr(value)


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    return _number(value) if isinstance(value, float) else str(value)


def check_formats(*, as_csv: bool, as_json: bool) -> None:
    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two formats: leave out one")


def print_rows(rows: pa.Table, limit: int | None, *, as_csv: bool, as_json: bool) -> None:
    """Prints rows, the first `limit` of them; in a table these are some where nothing is said."""
    shown = rows if limit is None else head(rows, limit)
    if as_json:
        print_json(rows_of(shown))
    elif as_csv:
        _print_csv(flat(shown))
    else:
        show_rows(shown if limit is not None else head(rows, MOST_ROWS_SHOWN), rows.num_rows)


def _print_csv(table: pa.Table) -> None:
    """Prints a file's contents as they are, and what a person sees in a terminal as it looks."""
    if not sys.stdout.isatty():
        pyarrow.csv.write_csv(table, sys.stdout.buffer)
        return
    text = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, text)
    click.echo(visible(text.getvalue().to_pybytes().decode(), keep="\n\t"), nl=False)
