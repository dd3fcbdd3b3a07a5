"""The stages of a store as temporary views of a Spark session, for SQL."""

from __future__ import annotations

import logging
from pathlib import Path

from pyspark.sql import SparkSession

from nosync.flow.kinds import is_shown
from nosync.lsm.errors import InvalidInputError, NotAvailableError, SchemaError
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.store.store import Store
from nosync.spark.data_source import FORMAT, register
from nosync.spark.expressions import quoted
from nosync.spark.schemas import spark_schema
from nosync.spark.session import check_running
from nosync.stores import open_to_read

log = logging.getLogger("nosync")


def views(
    spark: SparkSession, store: Store | str | Path, as_of: AsOf | None = None, *, branch: str = MAIN, prefix: str = ""
) -> dict[str, str]:
    """Makes every stage that a branch recorded a temporary view of the session. Returns, by stage, what SQL calls it.

    `store`: one that is open, a directory, or HOST:PORT of a daemon. `as_of`: the epoch, or a time, that all views show
    (default: the newest epoch now); so what is joined is of one epoch. The same call again shows a newer one. `prefix`:
    what names of views begin with.

    A view has its stage's name. One that is no identifier of SQL, such as `by-day` or `2013`, is written in backquotes,
    as what is returned has it. Raises NotAvailableError where no epoch is sealed.
    """
    if not isinstance(spark, SparkSession):
        raise InvalidInputError(f"views({spark!r}, ...): expected the SparkSession first, then the store")
    check_running(spark)
    if isinstance(store, Store):
        return _made(spark, store, as_of, branch, prefix)
    with open_to_read(str(store)) as opened:
        return _made(spark, opened, as_of, branch, prefix)


def _made(spark: SparkSession, store: Store, as_of: AsOf | None, branch: str, prefix: str) -> dict[str, str]:
    register(spark)
    t = store.newest(branch) if as_of is None else store.epoch_as_of(as_of, branch)
    manifest = None if t is None else store.manifest(t, branch)
    if t is None or manifest is None:
        raise NotAvailableError(
            f"branch {branch} has no sealed epoch{'' if t is None else f' {t}'}: there is nothing to see"
        )
    found: dict[str, str] = {}
    for stage in sorted({entry.id.trace.stage for entry in manifest.entries if is_shown(entry.id.trace.stage)}):
        try:
            schema = spark_schema(store.schema(stage, t, branch=branch), f"stage {stage}")
        except SchemaError as error:  # the others can be asked for all the same
            log.warning("no view is made of it: %s", error)
            continue
        reader = spark.read.format(FORMAT).schema(schema)
        reader = reader.option("stage", stage).option("branch", branch).option("asOf", t)
        name = quoted(prefix + stage)
        reader.load(store.source_path).createOrReplaceTempView(name)
        found[stage] = prefix + stage if (prefix + stage).isidentifier() else name
    return found
