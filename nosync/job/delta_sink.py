"""A Delta table as a sink, by deltalake: a commit an epoch.

The commit has the rows and transaction identifiers of Delta (`txn` actions: an app id and a version): which epoch it
is, of which line, and the number of the output. Delta refuses the commit of a writer that did not see the last one of the
same app id.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nosync.job.table_sink import (
    TableSink,
    TableState,
    check_names_apart,
    check_no_interval,
    needs,
    said_by,
    secrets_of,
)
from nosync.lsm.columnar.columns import EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError, StorageError
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable

_EPOCH, _OUTPUT, _LINE = "nosync.epoch", "nosync.output", "nosync.line"
"""App ids of Delta's transactions."""
_COMMITS_A_CHECKPOINT = 10
"""Whoever opens the table reads so many commits at most, and an epoch is one."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True)
class DeltaSink(TableSink):
    """Appends the changes of each epoch to a Delta table, in one commit. Precise.

    `path`: a directory, or a URL (`s3://`, `gs://`, `az://`) of which deltalake knows. `storage_options`: credentials and
    endpoints, as deltalake takes them; what is not said comes from the environment. The table has the stage's columns,
    `_change_type` and `_epoch`; columns that the stage gets later are added to it. The changes of an epoch go through the
    driver.
    """

    path: str | os.PathLike[str]
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not os.fspath(self.path):
            raise InvalidInputError("a DeltaSink needs the path or the URL of a table: it is empty")
        if "://" not in os.fspath(self.path):  # after a chdir it would be another one
            object.__setattr__(self, "path", os.path.abspath(self.path))
        needs("deltalake", "delta", self)

    def __str__(self) -> str:
        return f"the Delta table {os.fspath(self.path)}"

    def _state(self) -> TableState | None:
        table = self._table()
        if table is None:
            return None
        output, epoch = table.transaction_version(_OUTPUT), table.transaction_version(_EPOCH)
        if output is None or epoch is None:
            raise StorageError(f"{self} was made by others: give this sink a table of its own, which it makes")
        return TableState(output, epoch, table.transaction_version(_LINE) or 0, table)

    def _check_columns(self, schema: pa.Schema) -> None:
        check_no_interval(schema, "Delta")
        check_names_apart(schema, "Delta")

    def _make(self, schema: pa.Schema, output: int) -> TableState:
        from deltalake import DeltaTable  # noqa: PLC0415

        table = DeltaTable.create(
            os.fspath(self.path),
            schema,
            configuration={"delta.checkpointInterval": str(_COMMITS_A_CHECKPOINT)},
            storage_options=self._options,
            commit_properties=_says({_OUTPUT: output, _EPOCH: BEFORE_FIRST_EPOCH}),
        )
        return TableState(output, table=table)

    def _add(self, rows: pa.Table, now: TableState, state: TableState) -> None:
        from deltalake import write_deltalake  # noqa: PLC0415

        with self._alone():
            write_deltalake(state.table, rows, mode="append", schema_mode="merge", commit_properties=_as(now))

    def _remove(self, now: TableState, state: TableState) -> None:
        import pyarrow as pa  # noqa: PLC0415

        with self._alone():
            state.table.delete(f"{EPOCH_COLUMN} > {now.epoch}", commit_properties=_as(now))
        if state.table.transaction_version(_EPOCH) != now.epoch:  # where no row goes, Delta commits nothing
            self._add(pa.schema(state.table.schema().to_arrow()).empty_table(), now, state)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Delta refuses a commit on top of another one that says an epoch, and that was not seen."""
        from deltalake.exceptions import CommitFailedError  # noqa: PLC0415

        try:
            yield
        except CommitFailedError as error:
            raise StorageError(
                f"{self} was changed meanwhile: another driver gives it epochs ({said_by(error)})"
            ) from error

    def _table(self) -> DeltaTable | None:
        from deltalake import DeltaTable  # noqa: PLC0415
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415

        try:
            return DeltaTable(os.fspath(self.path), storage_options=self._options)
        except TableNotFoundError:
            return None

    @property
    def _options(self) -> dict[str, str] | None:
        """Returns what deltalake is told. An endpoint without TLS is used, as whoever set it wants it."""
        said = {name.upper(): value for name, value in self.storage_options.items()}
        endpoint = next((found for name in _ENDPOINTS if (found := said.get(name) or os.environ.get(name))), "")
        plain = {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") and "AWS_ALLOW_HTTP" not in said else {}
        return {**self.storage_options, **plain} or None

    @property
    def _secrets(self) -> Collection[str]:
        return secrets_of(self.storage_options)

    @property
    def _raised(self) -> tuple[type[Exception], ...]:
        return (Exception,)  # deltalake raises Exception itself for a type that Delta does not have


def _as(state: TableState) -> CommitProperties:
    return _says({_EPOCH: state.epoch, _LINE: state.line})


def _says(versions: Mapping[str, int]) -> CommitProperties:
    from deltalake import CommitProperties, Transaction  # noqa: PLC0415

    transactions: list[Any] = [Transaction(app, version) for app, version in versions.items()]
    return CommitProperties(app_transactions=transactions)
