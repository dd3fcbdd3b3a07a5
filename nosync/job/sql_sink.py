"""A table of a database as a sink, by SQLAlchemy: one transaction an epoch.

The table `nosync_outputs` beside it has one row for each table that a sink writes: the number of the output, and the last
epoch. The transaction of an epoch moves that row on from the epoch before. If it is not there, another driver was faster.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from nosync.job.table_sink import TableSink, TableState, check_names_apart, needs, said_by, secrets_of
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError, SchemaError, StorageError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table
    from sqlalchemy.types import TypeEngine

OUTPUTS = "nosync_outputs"
_ROWS_AT_ONCE = 10_000
_SQLITE = "sqlite"
_NAMES_WITHOUT_CASE = frozenset({_SQLITE, "mysql", "mariadb", "mssql"})
"""The databases for which columns that differ in case alone are the same one."""


@dataclass(frozen=True)
class SqlSink(TableSink):
    """Appends the changes of each epoch to a table of a database, in one transaction. Precise.

    `url`: of the database, as SQLAlchemy has it (`postgresql+psycopg://user:password@host/db`, `sqlite:///file.db`).
    `table`: which is made where it is not there, with the stage's columns, `_change_type` and `_epoch`; columns that the
    stage gets later are added to it. `schema`: of the database, where it is not the default one. The changes of an epoch
    go through the driver.
    """

    url: str = field(repr=False)
    table: str
    schema: str | None = None

    def __post_init__(self) -> None:
        needs("sqlalchemy", "sql", self)
        if not self.table or self.table == OUTPUTS:
            raise InvalidInputError(
                f"table {self.table!r}: a SqlSink needs the name of a table for the rows of a stage"
            )
        _ = self._connected

    @cached_property
    def _connected(self) -> Engine:
        import sqlalchemy as sa  # noqa: PLC0415

        try:
            url = sa.make_url(self.url)
            if url.get_backend_name() == _SQLITE and url.database and not url.database.startswith((":", "file:")):
                url = url.set(database=os.path.abspath(url.database))  # after a chdir it would be another one
            return sa.create_engine(url)
        except ImportError as error:
            raise InvalidInputError(
                f"the driver of this database is not installed: pip install {error.name}, or say another one, as in "
                "postgresql+psycopg://user@host/database"
            ) from None
        except sa.exc.NoSuchModuleError as error:
            raise InvalidInputError(
                f"the URL of a SqlSink is of a database that SQLAlchemy does not know: {error}"
            ) from None
        except (sa.exc.ArgumentError, ValueError, TypeError):  # they may quote a part of the password
            raise InvalidInputError(
                "a SqlSink needs the URL of a database, as in postgresql+psycopg://user@host/database or sqlite:///file.db; in a "
                "password, `@`, `:` and `/` are written as %40, %3A and %2F"
            ) from None

    def __str__(self) -> str:
        where = self._connected.url.set(query={}).render_as_string(hide_password=True)  # a query may have a password
        return f"table {self.table if self.schema is None else f'{self.schema}.{self.table}'} of {where}"

    @property
    def _raised(self) -> tuple[type[Exception], ...]:
        import sqlalchemy as sa  # noqa: PLC0415

        return (sa.exc.SQLAlchemyError,)

    @property
    def _secrets(self) -> Collection[str]:
        query = {name: str(value) for name, value in self._connected.url.query.items()}
        return secrets_of({"url password": self.url, "password": str(self._connected.url.password or ""), **query})

    # --- what the database says ---------------------------------------------------------------------------------------

    def _state(self) -> TableState | None:
        import sqlalchemy as sa  # noqa: PLC0415

        with self._connected.connect() as connection:
            inspector, outputs = sa.inspect(connection), self._outputs
            found = None
            if inspector.has_table(OUTPUTS, self.schema):
                row = connection.execute(sa.select(outputs).where(outputs.c.name == self.table)).first()
                if row is not None:
                    found = TableState(int(row.output), int(row.epoch), int(row.line))
            if inspector.has_table(self.table, self.schema):
                if found is None:
                    raise StorageError(f"{self} was made by others: give this sink a table of its own, which it makes")
                return found
        return None  # what is said of a table that was dropped does not count

    @property
    def _outputs(self) -> Table:
        import sqlalchemy as sa  # noqa: PLC0415

        return sa.Table(
            OUTPUTS,
            sa.MetaData(schema=self.schema),
            sa.Column("name", sa.String(255), primary_key=True),
            sa.Column("output", sa.BigInteger, nullable=False),
            sa.Column("epoch", sa.BigInteger, nullable=False),
            sa.Column("line", sa.BigInteger, nullable=False),
        )

    # --- transactions -------------------------------------------------------------------------------------------------

    def _make(self, schema: pa.Schema, output: int) -> TableState:
        """Its row comes first: SQLite begins a transaction with a row, and not with a table."""
        table, outputs, state = self._table_of(schema), self._outputs, TableState(output)
        with self._connected.begin() as connection:
            outputs.create(connection, checkfirst=True)
            connection.execute(outputs.delete().where(outputs.c.name == self.table))
            connection.execute(outputs.insert(), {"name": self.table, "output": output, **_as(state)})
            table.create(connection)
        return state

    def _add(self, rows: pa.Table, now: TableState, state: TableState) -> None:
        table = self._table_of(rows.schema)
        self._check(rows)
        with self._connected.begin() as connection:
            self._add_columns(connection, table)
            self._move(connection, state, now)
            for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
                if batch.num_rows:
                    connection.execute(table.insert(), self._values(batch))

    def _remove(self, now: TableState, state: TableState) -> None:
        import sqlalchemy as sa  # noqa: PLC0415

        table = sa.Table(self.table, sa.MetaData(schema=self.schema), sa.Column(EPOCH_COLUMN, sa.BigInteger))
        with self._connected.begin() as connection:
            self._move(connection, state, now)
            connection.execute(table.delete().where(table.c[EPOCH_COLUMN] > now.epoch))

    def _move(self, connection: Connection, state: TableState, now: TableState) -> None:
        """Says `now` where the table says `state`. Raises StorageError where it does not."""
        outputs = self._outputs
        mine = (outputs.c.name == self.table) & (outputs.c.output == state.output)
        mine &= (outputs.c.epoch == state.epoch) & (outputs.c.line == state.line)
        if connection.execute(outputs.update().where(mine).values(**_as(now))).rowcount != 1:
            raise StorageError(f"{self} was changed meanwhile: another driver gives it epochs")

    def _add_columns(self, connection: Connection, table: Table) -> None:
        """Adds the columns that the stage has more than the table."""
        import sqlalchemy as sa  # noqa: PLC0415

        there = {column["name"] for column in sa.inspect(connection).get_columns(self.table, self.schema)}
        for column in table.columns:
            if column.name not in there:
                made = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
                name = connection.dialect.identifier_preparer.format_table(table)
                # Not as a text of SQLAlchemy, in which % and : stand for other things; names are quoted already.
                connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {made}")

    def _check_columns(self, schema: pa.Schema) -> None:
        self._table_of(schema)
        if self._connected.dialect.name in _NAMES_WITHOUT_CASE:
            check_names_apart(schema, "this database")

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _table_of(self, schema: pa.Schema) -> Table:
        """Returns the table for rows of a schema. Raises SchemaError for a column that a database does not take."""
        import sqlalchemy as sa  # noqa: PLC0415

        is_sqlite = self._connected.dialect.name == _SQLITE
        most = self._connected.dialect.max_identifier_length
        long = next((name for name in schema.names if len(name.encode()) > most), None)
        if long is not None:
            raise SchemaError(
                f"column {long!r}: a name has at most {most} bytes in this database, which would cut it off: rename it in a "
                "stage before (select)"
            )
        columns = [sa.Column(field.name, _type_of(field, is_sqlite=is_sqlite)) for field in schema]
        of_index = f"ix_{self.table}_{EPOCH_COLUMN.strip('_')}"
        if len(of_index.encode()) > most:
            of_index = f"ix_{hashlib.sha256(of_index.encode()).hexdigest()[:16]}"
        index = sa.Index(of_index, EPOCH_COLUMN)
        return sa.Table(self.table, sa.MetaData(schema=self.schema), *columns, index)

    def _check(self, rows: pa.Table) -> None:
        """Raises InvalidInputError for a value that the database would silently keep as another one."""
        if self._connected.dialect.name != _SQLITE:
            return
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                raise InvalidInputError(
                    f"column {name!r} has a NaN, which SQLite keeps as null: leave it out in a stage before "
                    f'(where "NOT isnan({name})"), or make null of it (select "nullif({name}, \'NaN\')")'
                )

    def _values(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Returns rows as the driver takes them. SQLite has no decimals: there they are texts."""
        is_sqlite = self._connected.dialect.name == _SQLITE
        columns = [
            column.cast(pa.string()) if is_sqlite and pa.types.is_decimal(column.type) else column
            for column in batch.columns
        ]
        with _representable():
            rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
        return rows


def _as(state: TableState) -> dict[str, int]:
    return {"epoch": state.epoch, "line": state.line}


@contextlib.contextmanager
def _representable() -> Iterator[None]:
    try:
        yield
    except (OverflowError, ValueError) as error:
        raise InvalidInputError(
            f"a time or date is none that Python's drivers of databases take: {said_by(error)}"
        ) from None


def _type_of(field: pa.Field, *, is_sqlite: bool) -> TypeEngine[Any]:
    import sqlalchemy as sa  # noqa: PLC0415

    type_ = field.type
    if field.name == CHANGE_TYPE_COLUMN:
        return sa.String(20)
    if pa.types.is_decimal(type_):
        return sa.Text() if is_sqlite else sa.Numeric(type_.precision, type_.scale)
    if pa.types.is_timestamp(type_):
        return _time(has_zone=type_.tz is not None)
    for is_it, made in _types():
        if is_it(type_):
            return made
    raise SchemaError(
        f"column {field.name!r} has type {type_}, which a SqlSink does not write: take its parts in a select before, or its "
        f"text (to_json({field.name}))"
    )


def _time(*, has_zone: bool) -> TypeEngine[Any]:
    """Returns a type with microseconds. Some databases have fewer digits where nothing is said."""
    import sqlalchemy as sa  # noqa: PLC0415
    from sqlalchemy.dialects import mssql, mysql  # noqa: PLC0415

    with_digits = sa.DateTime(timezone=has_zone).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    return with_digits.with_variant(mssql.DATETIMEOFFSET(6) if has_zone else mssql.DATETIME2(6), "mssql")  # type: ignore[no-untyped-call]


def _types() -> Sequence[tuple[Any, TypeEngine[Any]]]:
    import sqlalchemy as sa  # noqa: PLC0415

    t = pa.types
    return [
        (t.is_boolean, sa.Boolean()),
        (lambda x: t.is_int8(x) or t.is_int16(x), sa.SmallInteger()),
        (t.is_int32, sa.Integer()),
        (t.is_int64, sa.BigInteger()),
        (t.is_float32, sa.Float(24)),
        (t.is_float64, sa.Double()),
        (t.is_date, sa.Date()),
        (lambda x: t.is_string(x) or t.is_large_string(x), sa.Text()),
        (lambda x: t.is_binary(x) or t.is_large_binary(x), sa.LargeBinary()),
    ]
