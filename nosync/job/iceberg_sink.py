"""An Iceberg table as a sink, by pyiceberg: a snapshot an epoch.

The commit of an epoch has its rows and, as properties of the snapshot and of the table, its number. It is made on top of the
snapshot that was read, and pyiceberg would make it again on top of another writer's: that is turned off here, for
the other one may have added the same epoch. After compactions and the like by others it is made again by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nosync.job.table_sink import TableSink, TableState, check_no_interval, needs, secrets_of
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table, Transaction

_EPOCH, _OUTPUT, _LINE = "nosync.epoch", "nosync.output", "nosync.line"
"""Properties."""
_RETRIES = "commit.retry.num-retries"
_ATTEMPTS = 5


@dataclass(frozen=True)
class IcebergSink(TableSink):
    """Appends the changes of each epoch to an Iceberg table, in one snapshot. Precise.

    `table`: with its namespace, as in `shop.spending`; it is made where it is not there. `catalog`: its name in
    `.pyiceberg.yaml` or the environment, as pyiceberg finds it; `properties`: what is not said there. The table has the
    stage's columns, `_change_type` and `_epoch`; columns that the stage gets later are added to it. The changes of an epoch
    go through the driver.
    """

    table: str
    catalog: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if "." not in self.table.strip("."):
            raise InvalidInputError(f"table {self.table!r}: say its namespace, too, as in 'shop.spending'")
        needs("pyiceberg.catalog", "iceberg", self)

    def __str__(self) -> str:
        return f"the Iceberg table {self.table} of catalog {self.catalog!r}"

    def _state(self) -> TableState | None:
        table = self._loaded()
        if table is None:
            return None
        if _OUTPUT not in table.properties:
            raise StorageError(f"{self} was made by others: give this sink a table of its own, which it makes")
        output, epoch, line = (int(table.properties[name]) for name in (_OUTPUT, _EPOCH, _LINE))
        return TableState(output, epoch, line, table)

    def _check_columns(self, schema: pa.Schema) -> None:
        check_no_interval(schema, "Iceberg")

    def _make(self, schema: pa.Schema, output: int) -> TableState:
        state = TableState(output)
        self._opened.create_namespace_if_not_exists(self.table.rpartition(".")[0])
        table = self._opened.create_table(self.table, schema, properties={_OUTPUT: str(output), **_as(state)})
        return replace(state, table=table)

    def _add(self, rows: pa.Table, now: TableState, state: TableState) -> None:
        def add(transaction: Transaction) -> None:
            known = {column.name for column in transaction.table_metadata.schema().columns}
            if not known >= set(rows.column_names):
                with transaction.update_schema() as update:
                    update.union_by_name(rows.schema)
            transaction.append(rows, snapshot_properties={_EPOCH: str(now.epoch)})

        self._commit(add, now, state)

    def _remove(self, now: TableState, state: TableState) -> None:
        def remove(transaction: Transaction) -> None:
            with warnings.catch_warnings():  # that no row goes, where the epochs had none
                warnings.filterwarnings("ignore", "Delete operation did not match any records")
                transaction.delete(f"{EPOCH_COLUMN} > {now.epoch}", snapshot_properties={_EPOCH: str(now.epoch)})

        self._commit(remove, now, state)

    def _commit(self, change: Callable[[Transaction], None], now: TableState, state: TableState) -> None:
        """Makes one commit, after which the table says `now`, if it says `state` before."""
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415

        table: Table = state.table
        for attempt in range(_ATTEMPTS):
            table.metadata.properties[_RETRIES] = "0"  # in what was read; others read what the table says
            transaction = table.transaction()
            change(transaction)
            transaction.set_properties(_as(now))
            try:
                transaction.commit_transaction()
                return
            except CommitFailedException:
                found = self._state()
                if found is None or found != state:
                    raise StorageError(f"{self} was changed meanwhile: another driver gives it epochs") from None
                if attempt + 1 == _ATTEMPTS:
                    raise
                table = found.table

    def _loaded(self) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError  # noqa: PLC0415

        try:
            found: Table = self._opened.load_table(self.table)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        return found

    @cached_property
    def _opened(self) -> Any:
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415

        return load_catalog(self.catalog, **self.properties)

    @property
    def _secrets(self) -> Collection[str]:
        return secrets_of(self.properties)

    @property
    def _raised(self) -> tuple[type[Exception], ...]:
        return (Exception,)  # catalogs and file systems raise what their libraries raise


def _as(state: TableState) -> dict[str, str]:
    return {_EPOCH: str(state.epoch), _LINE: str(state.line)}
