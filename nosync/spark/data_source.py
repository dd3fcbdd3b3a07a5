"""`spark.read.format("nosync")` and `spark.readStream.format("nosync")`: stages as tables, for any Spark program.

    nosync.register(spark)
    spark.read.format("nosync").option("path", "state/").option("stage", "delays").option("asOf", 26).load()
    spark.readStream.format("nosync").option("path", "state/").option("stage", "delays").option("readChangeFeed", "true").load()

Options (names as Delta's, with epochs in the place of versions)

    path (or load(path))            the store's directory, seen by driver and executors; or HOST:PORT of its daemon
    stage                           which stage
    branch                          which branch; default: main
    asOf                            the epoch whose state to read, or a time of the wall clock: the last epoch sealed by
                                    then; default: the last sealed one
    versionAsOf, timestampAsOf      the same, as Delta spells them: an epoch; a time
    readChangeFeed                  true: the change feed instead of the state; a stream reads nothing else
    startingEpoch, endingEpoch      the first and last epoch of the feed; default: the first of all, the last sealed
    includeExpired                  true: rows that expired are in the feed, as `expire`; default: they are left out

The store is opened read-only, so a job may be writing it. One task a shard. A DataFrame stays at the epoch of its first
action: load() gives another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import datasource as ds
from pyspark.sql.types import StructField, StructType

from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, EPOCH_COLUMN
from nosync.lsm.errors import InvalidInputError, NotAvailableError, SchemaError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.as_of import AsOf, parse_as_of
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH
from nosync.lsm.store.store import Store
from nosync.spark.schemas import spark_schema
from nosync.spark.versions import arrow_schema
from nosync.stores import open_to_read

FORMAT = "nosync"
OPTIONS = {
    name.lower(): name
    for name in (
        "path", "stage", "branch", "asOf", "versionAsOf", "timestampAsOf", "readChangeFeed", "startingEpoch",
        "endingEpoch", "includeExpired",
    )
}  # fmt: skip
"""As they are written, by what Spark makes of them."""
_METADATA = "nosync"
"""The key, in the metadata of the first column of a table of the catalog, of the options that it was made with."""
_OWNER = "owner"
"""The property that every table has which is made in the catalog."""
_OPTION = "option."
"""What begins the name of a property for each option."""
_VERSION_AS_OF, _TIMESTAMP_AS_OF = "versionasof", "timestampasof"
_AS_OF = ("asof", _VERSION_AS_OF, _TIMESTAMP_AS_OF)

_ONLY_READ = (
    f"format {FORMAT!r} is for reading: a store gets its rows as epochs of a job, from job.advance(t, {{...}}), "
    "job.backfill(...) or job.stream(...)"
)


def register(spark: SparkSession) -> None:
    """Makes the format known to the session."""
    spark.dataSource.register(NosyncDataSource)


class Options:
    """Holds the options of one read, checked. Raises InvalidInputError naming the option."""

    def __init__(self, given: Any, schema: StructType | None = None) -> None:
        """`schema`: of the table that is read, where it may be one of the catalog, whose options Spark does not give."""
        found = {str(name).lower(): str(value) for name, value in given.items()}
        self.is_of_catalog = _OWNER in found
        if self.is_of_catalog:
            found = _options_in(found)
        found = _options_of_table(schema) | found
        unknown = sorted(found.keys() - OPTIONS.keys())
        if unknown:
            as_delta = (
                ": epochs are versions here, so startingEpoch, endingEpoch or asOf" if "version" in unknown[0] else ""
            ) or did_you_mean(unknown[0], OPTIONS.values())
            raise InvalidInputError(
                f"format {FORMAT!r} has no option {unknown[0]!r}{as_delta}; options: {', '.join(OPTIONS.values())}"
            )
        for name in ("path", "stage"):
            if name not in found and schema is not None and not given:
                raise InvalidInputError(
                    f"a table of format {FORMAT!r} has the columns of its stage: make it without any, as in CREATE TABLE t "
                    f"USING {FORMAT} OPTIONS (path '...', stage '...')"
                )
            if name not in found:
                raise InvalidInputError(f"format {FORMAT!r} needs the option {name!r}")
        self.given = found
        self.path, self.stage = found["path"], found["stage"]
        self.branch = found.get("branch", MAIN)
        self.as_of = _as_of(found)
        self.starting_epoch, self.ending_epoch = _epoch(found, "startingepoch"), _epoch(found, "endingepoch")
        self.change_feed, self.include_expired = _is_true(found, "readchangefeed"), _is_true(found, "includeexpired")
        useless = _AS_OF if self.change_feed else ("startingepoch", "endingepoch", "includeexpired")
        for name in useless:
            if name in found:
                needs = (
                    "a state, and this reads the change feed"
                    if self.change_feed
                    else "the change feed: readChangeFeed=true"
                )
                raise InvalidInputError(f"option {OPTIONS[name]} is for {needs}")

    def open(self) -> Store:
        """Opens the store to read, with what its host lacks fetched from peers, or from the daemon at an address."""
        return open_to_read(self.path)


def _options_in(properties: Mapping[str, str]) -> dict[str, str]:
    """Returns the options among the properties of a table that is made in the catalog. Others are the catalog's own, or
    the user's.
    """
    said = {name.removeprefix(_OPTION) for name in properties if name.startswith(_OPTION)}
    return {name: value for name, value in properties.items() if name in said or name in OPTIONS}


def _options_of_table(schema: StructType | None) -> dict[str, str]:
    """Returns the options that a table of the catalog was made with; none of a table that is none of it."""
    first = next(iter(schema or ()), None)
    found = {} if first is None else first.metadata.get(_METADATA, {})
    return {str(name): str(value) for name, value in found.items()}


def _of_catalog(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Returns the schema of a table that is made in the catalog, with the options that it is made with.

    When such a table is read Spark gives its schema, and not the options.
    """
    first, *rest = schema.fields
    marked = StructField(first.name, first.dataType, first.nullable, {_METADATA: dict(options)})
    return StructType([marked, *rest])


def _as_of(options: dict[str, str]) -> AsOf | None:
    given = [name for name in _AS_OF if name in options]
    if len(given) > 1:
        raise InvalidInputError(
            f"options {OPTIONS[given[0]]} and {OPTIONS[given[1]]} say one thing twice: leave out one"
        )
    if not given:
        return None
    name, text = given[0], options[given[0]]
    if name == _VERSION_AS_OF:
        return _epoch(options, name)
    try:
        found = parse_as_of(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"option {OPTIONS[name]}: {error}") from None
    if name == _TIMESTAMP_AS_OF and isinstance(found, int):
        raise InvalidInputError(
            f"option {OPTIONS[name]}={text!r} is no time; for an epoch say {OPTIONS[_VERSION_AS_OF]}"
        )
    return found


def _epoch(options: dict[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidInputError(f"option {OPTIONS[name]}={text!r} is not an epoch number")
    return int(text)


def _is_true(options: dict[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidInputError(f"option {OPTIONS[name]}={text!r} is not true or false")
    return text == "true"


class ShardPartition(ds.InputPartition):
    """Stands for one shard at an epoch, or for its changes over a range of epochs."""

    def __init__(self, shard: int | None, after: int, until: int) -> None:
        """`shard`: None for all of them."""
        super().__init__(shard)
        self.shard, self.after, self.until = shard, after, until


class NosyncDataSource(ds.DataSource):
    """Is the format itself; Spark makes one for each read."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        options = Options(self.options)
        with options.open() as store:
            as_of = options.ending_epoch if options.change_feed else options.as_of
            schema = store.schema(options.stage, as_of, branch=options.branch)
        found = spark_schema(_with_change_columns(schema) if options.change_feed else schema, f"stage {options.stage}")
        return _of_catalog(found, options.given) if options.is_of_catalog else found

    def reader(self, schema: StructType) -> ds.DataSourceReader:
        return Reader(Options(self.options, schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        raise InvalidInputError(_ONLY_READ)

    def streamWriter(self, schema: StructType, overwrite: bool) -> ds.DataSourceStreamWriter:
        raise InvalidInputError(_ONLY_READ)

    def streamReader(self, schema: StructType) -> ds.DataSourceStreamReader:
        options = Options(self.options, schema)
        if not options.change_feed or options.ending_epoch is not None:
            raise InvalidInputError(
                f"a stream of format {FORMAT!r} reads the change feed, without an end: "
                + ("leave out endingEpoch" if options.change_feed else "set the option readChangeFeed to true")
            )
        return StreamReader(options, schema)


def _with_change_columns(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field(CHANGE_TYPE_COLUMN, pa.string())).append(pa.field(EPOCH_COLUMN, pa.int64()))


def _partitions(options: Options, after: int, until: int) -> list[ShardPartition]:
    with options.open() as store:
        parts = store.shards if options.change_feed else store.parts
        return [ShardPartition(shard, after, until) for shard in parts(options.stage, until, branch=options.branch)]


def _read(options: Options, part: ShardPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
    with options.open() as store:
        if options.change_feed:
            table = store.changes(
                options.stage, part.after, part.until, shard=part.shard, branch=options.branch,
                include_expired=options.include_expired,
            )  # fmt: skip
        else:
            table = store.read(options.stage, part.until, shard=part.shard, branch=options.branch)
    missing = next((name for name in schema.names if name not in table.column_names), None)
    if missing is not None:
        raise SchemaError(
            f"stage {options.stage} has no column {missing!r} there; it has {', '.join(table.column_names)}. Where an upgrade "
            "gave it other columns since, make the DataFrame, or the table of the catalog, again; or ask for an epoch before it"
        )
    # Spark has one unit for timestamps and one size of lists; a store without Spark may have others.
    table = table.select(schema.names).cast(arrow_schema(schema))
    yield from table.to_batches()


class Reader(ds.DataSourceReader):
    """Reads a state, or a change feed, as a batch.

    It takes no filters from Spark, which keeps one reader, with what was given to it, for all scans of a DataFrame or a
    view: each would get the filters of the last one. What it plans is kept, too, so a DataFrame stays at its epoch.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> Sequence[ds.InputPartition]:
        options = self._options
        with options.open() as store:
            until = options.ending_epoch if options.change_feed else None
            if options.as_of is not None:  # tasks get the epoch: what a time stands for may change while they begin
                until = store.epoch_as_of(options.as_of, options.branch)
            until = store.newest(options.branch) if until is None else until
        if until is None:
            raise NotAvailableError(f"{options.path}: no epoch is sealed yet; give asOf or endingEpoch")
        start = options.starting_epoch
        if start is not None and start > until:
            last = "the newest epoch is" if options.ending_epoch is None else "endingEpoch is"
            raise InvalidInputError(
                f"option startingEpoch={start} is after the last epoch that is asked for: {last} {until}"
            )
        return _partitions(options, BEFORE_FIRST_EPOCH if start is None else start - 1, until)

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ShardPartition)
        return _read(self._options, partition, self._schema)


Offset = dict[str, Any]


class StreamReader(ds.DataSourceStreamReader):
    """Reads the change feed as a stream: an offset is the last epoch that was read, and the timeline that sealed it."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema

    def initialOffset(self) -> Offset:
        start = self._options.starting_epoch
        return {"epoch": BEFORE_FIRST_EPOCH if start is None else start - 1, "line": ""}

    def latestOffset(self, start: Offset | None = None, limit: Any = None) -> Offset:
        known = self.initialOffset() if start is None else start
        with self._options.open() as store:
            last = store.newest(self._options.branch)
            self._check_timeline(store, known)
            if last is None or last <= known["epoch"]:
                return known
            return {"epoch": last, "line": store.timeline_of(last, self._options.branch) or ""}

    def _check_timeline(self, store: Store, offset: Offset) -> None:
        """Raises InvalidInputError where what the stream was given last is not the branch's past any more."""
        t, timeline = offset["epoch"], offset.get("line", "")
        now = store.timeline_of(t, self._options.branch) if timeline else ""
        if now != timeline:
            raise InvalidInputError(
                f"{self._options.path}: branch {self._options.branch} was rewound, or another one promoted, since this stream "
                f"read epoch {t}: what it was given after the fork is not taken back. Begin again with a new checkpoint"
            )

    def partitions(self, start: Offset, end: Offset) -> Sequence[ds.InputPartition]:
        if end["epoch"] <= start["epoch"]:
            return []
        with self._options.open() as store:
            self._check_timeline(store, start)
            self._check_timeline(store, end)  # of a batch that runs again
        return _partitions(self._options, start["epoch"], end["epoch"])

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ShardPartition)
        return _read(self._options, partition, self._schema)

    def commit(self, end: Offset) -> None:
        """Does nothing: retain= and pins decide what is kept."""

    def stop(self) -> None:
        """Does nothing: the reader holds nothing."""
