"""The command that asks a store in SQL."""

from __future__ import annotations

from pathlib import Path

import click

from nosync.cli.app import cli
from nosync.cli.console import (
    JSON,
    MOST_ROWS_SHOWN,
    POINT_IN_TIME,
    STORE,
    check_formats,
    print_rows,
    read_only,
)
from nosync.cli.jobs import CORES
from nosync.cli.sessions import spark_session
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.platform.nearest import named_stages

_ABOUT_NAMES = ("TABLE_OR_VIEW_NOT_FOUND", "UNRESOLVED_COLUMN.WITH_SUGGESTION", "UNRESOLVED_COLUMN.WITHOUT_SUGGESTION")
_ONLY_SHOW = ("Show", "Describe", "Explain")
"""How the statements are called, in Spark's plans, that are no queries and change nothing."""


@cli.command()
@STORE
@click.argument("query")
@click.option(
    "--as-of", type=POINT_IN_TIME, help="The epoch that all stages show, or a time. [default: the last sealed one]"
)
@click.option("--branch", default="main", show_default=True, help="Which branch to ask.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Rows to show. [default: {MOST_ROWS_SHOWN} in a table, else all]"
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@CORES
@JSON
def sql(
    path: Path,
    query: str,
    as_of: AsOf | None,
    branch: str,
    limit: int | None,
    as_csv: bool,
    cores: int | None,
    as_json: bool,
) -> None:
    """Ask a store in Spark's SQL. Every stage is a view under its name, all of them as of one epoch.

    A name with a - goes in `backquotes`; mind that shells take these for something else outside of '...'. Spark starts
    for it, in some seconds.

    \b
      nosync sql state/ "SELECT origin, mean FROM delays ORDER BY mean DESC LIMIT 3"
      nosync sql state/ "SELECT count(*) FROM delays" --as-of 2026-07-04T12:00
      nosync sql state/ "SELECT * FROM delays JOIN airports USING (origin)" --csv
    """
    check_formats(as_csv=as_csv, as_json=as_json)
    with read_only(path) as store:
        t = store.newest(branch) if as_of is None else store.epoch_as_of(as_of, branch)
        if t is None or store.manifest(t, branch) is None:  # told before Spark starts
            raise InvalidInputError(
                f"branch {branch} has no sealed epoch{'' if t is None else f' {t}'}: there is nothing to ask"
            )
        with spark_session(cores) as spark:
            from pyspark.errors import PySparkException  # noqa: PLC0415 - only this command needs Spark

            from nosync.spark.errors import reason_of, without_log  # noqa: PLC0415
            from nosync.spark.plans.query import command_in  # noqa: PLC0415
            from nosync.spark.views import views  # noqa: PLC0415

            names = views(spark, store, t, branch=branch)
            try:
                with without_log():
                    parsed = spark._jsparkSession.sessionState().sqlParser().parsePlan(query)
                    command = command_in(spark, parsed)
                    if command is not None and not command.startswith(_ONLY_SHOW):
                        raise InvalidInputError(f"{command} changes something, and this only asks: give SELECT ...")
                    table = spark.sql(query).toArrow()
            except PySparkException as error:
                said = reason_of(str(error)).rstrip(" ;")
                is_about_names = error.getCondition() in _ABOUT_NAMES
                raise NosyncError(
                    said + (f"; stages: {named_stages(names.values())}" if is_about_names else "")
                ) from None
    print_rows(table, limit, as_csv=as_csv, as_json=as_json)
