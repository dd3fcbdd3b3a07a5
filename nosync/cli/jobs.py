"""Commands that need the code of a dataflow, and Spark."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

import nosync
from nosync.cli.app import cli
from nosync.cli.console import (
    ALONE,
    JSON,
    POINT_IN_TIME,
    STORE,
    check_store,
    confirmed,
    head,
    out,
    parse_keys,
    print_json,
    progress,
    read_only,
    show_rows,
)
from nosync.cli.sessions import spark_session, start_session
from nosync.flow.views import NoSessionError
from nosync.job.recovery_planner import lost_manifest
from nosync.lsm.errors import InvalidInputError, NosyncError, NotAvailableError
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.store.store import Store
from nosync.spark.java import launch_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nosync.job.replay import ReplayPlanner


FLOW = click.option(
    "--flow", "flow_name", metavar="MODULE:FUNCTION", required=True,
    help="The function that builds the dataflow; its module is looked for here first.",
)  # fmt: skip
CORES = click.option("--cores", type=click.IntRange(min=1), help="Cores for Spark. [default: all]")


def _load_flow(text: str, cores: int | None) -> nosync.Dataflow:
    """Returns the flow of a function. One that declares views is read by Spark, which starts for it before its turn."""
    try:
        return _flow_of(text)
    except NoSessionError:
        start_session(cores)
        return _flow_of(text)


def _flow_of(text: str) -> nosync.Dataflow:
    module_name, colon, function_name = text.partition(":")
    if not colon or not module_name or not function_name:
        raise InvalidInputError(f"--flow {text!r} is not MODULE:FUNCTION, such as my_job:make_flow")
    sys.path.insert(0, str(Path.cwd()))
    # Spark's workers unpickle the flow's functions from the same module.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    try:
        module = importlib.import_module(module_name)
    except NoSessionError:
        raise
    except SystemExit:
        raise InvalidInputError(
            f"--flow {text}: importing {module_name} ended the program: put what runs the job below "
            "if __name__ == '__main__':"
        ) from None
    except Exception as error:  # whatever the module does, or a path in the place of its name
        why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        hint = f"; write --flow {Path(module_name).stem}:{function_name}" if module_name.endswith(".py") else ""
        raise InvalidInputError(f"--flow {text}: cannot import {module_name}: {why}{hint}") from error
    make = getattr(module, function_name, None)
    if make is None:
        raise InvalidInputError(f"--flow {text}: {module_name} has no {function_name}")
    try:
        flow = make() if callable(make) else make
    except NosyncError:
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInputError(f"--flow {text}: {function_name}() raised {type(error).__name__}: {error}") from error
    if not isinstance(flow, nosync.Dataflow):
        raise InvalidInputError(f"--flow {text}: it gives a {type(flow).__name__}, expected a nosync.Dataflow")
    return flow


@contextmanager
def _job(path: Path, flow: nosync.Dataflow, branch: str, cores: int | None, *, alone: bool) -> Iterator[nosync.Job]:
    """Opens the job that goes on where the store is; an older job that still runs is fenced."""
    check_store(path)
    with nosync.open(path, alone=alone) as store:
        last = store.last_sealed(branch)
        if last is None and store.newest(branch) is None:
            raise NosyncError(f"{path} has no epoch yet: run the job first")
        assert last is not None, "newest raises where all epochs are lost"
        manifest = store.node.timelines.manifest(last, branch)
        shards = manifest.shard_count if manifest else None
        with spark_session(cores) as spark:
            yield nosync.Job(flow, store, spark=spark, shards=shards or 1, branch=branch)


@cli.command()
@STORE
@click.argument("branch")
@FLOW
@click.option("--to", type=click.IntRange(min=0), help="The epoch to replay to. [default: all that the parent has]")
@click.option("--dry-run", is_flag=True, help="Only say what would be computed.")
@CORES
@ALONE
@JSON
def replay(
    path: Path,
    branch: str,
    flow_name: str,
    to: int | None,
    dry_run: bool,
    cores: int | None,
    alone: bool,
    as_json: bool,
) -> None:
    """Replay BRANCH from the recorded inputs: the stages whose code has changed, and what is computed from them.

    The flow is the branch's, with the changed code. After an interruption the same command goes on where it was. A job
    that runs on BRANCH is stopped (FencedError), except by --dry-run, which changes nothing.

    \b
      nosync replay state/ no-weather --flow my_job:without_weather
    """
    flow = _load_flow(flow_name, cores)
    if dry_run:
        check_store(path)
        with nosync.open(path, alone=alone) as store, spark_session(cores) as spark:
            plan = _replay_planner(flow, store, spark, branch).plan(to)
        print_json(dataclasses.asdict(plan)) if as_json else out.print(escape(str(plan)))
        return
    with _job(path, flow, branch, cores, alone=alone) as job:
        plan = job.plan_replay(to)
        if not as_json:
            out.print(escape(str(plan)))
        with progress(f"replaying {branch}", quiet=as_json) as advance:
            report = job.replay(to, progress=lambda done, of: advance(done, of, "epochs"))
        print_json(dataclasses.asdict(report)) if as_json else out.print(escape(str(report)))


@cli.command()
@STORE
@FLOW
@click.option("--keep-as", metavar="NAME", help="The branch that keeps the line before. [default: before-upgrade-N]")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
@CORES
@ALONE
@JSON
def upgrade(
    path: Path,
    flow_name: str,
    keep_as: str | None,
    dry_run: bool,
    yes: bool,
    cores: int | None,
    alone: bool,
    as_json: bool,
) -> None:
    """Let the epochs to come run the flow as it is now: fixed code, more columns, stages that are new or gone.

    It says first what becomes of each stage, and asks; with --json it does nothing without --yes. What is recorded stays
    what it is, on a branch of its own too. A job that runs on the store is stopped (FencedError): start it again with
    the new code.

    \b
      nosync upgrade state/ --flow my_job:make_flow --dry-run
    """
    flow = _load_flow(flow_name, cores)
    check_store(path)
    with nosync.open(path, alone=alone) as store, spark_session(cores) as spark:
        from nosync.job.upgrade import upgrade_of  # noqa: PLC0415 - needs pyspark

        planned = upgrade_of(flow, store, spark, keep_as)
        plan = planned.plan
        if plan is None:
            raise NosyncError(f"{path} has no epoch yet: there is nothing to upgrade, run the job")
        if not as_json:
            out.print(escape(str(plan)))
        done = False
        if plan.is_needed and not dry_run and (yes or (not as_json and confirmed("Do it?"))):
            planned.run()
            done = True
    if as_json:
        print_json({**dataclasses.asdict(plan), "done": done})
    elif done:
        out.print("done: start the job with the new code")


def _replay_planner(flow: nosync.Dataflow, store: Store, spark: SparkSession, branch: str) -> ReplayPlanner:
    """Returns the planner that a job has, without being a job, which would stop the one that runs."""
    from nosync.job.epoch_layout import EpochLayout  # noqa: PLC0415
    from nosync.job.flow_versions import FlowVersions  # noqa: PLC0415
    from nosync.job.position import Position  # noqa: PLC0415
    from nosync.job.replay import ReplayPlanner  # noqa: PLC0415
    from nosync.spark.expressions import Analyzer  # noqa: PLC0415
    from nosync.spark.schemas import parse_ddl  # noqa: PLC0415 - needs pyspark
    from nosync.spark.session import expression_settings  # noqa: PLC0415

    position, analyze = Position(store, branch), Analyzer(spark, expression_settings(spark))
    versions = FlowVersions(flow, store.node, position, parse_ddl, analyze)
    layout = EpochLayout(store.directory, position, versions, shards=1)  # sealed epochs have shards of their own
    return ReplayPlanner(store.node, store.directory, position, versions, layout)


@cli.command()
@STORE
@click.argument("stage")
@click.option(
    "--key", "keys", multiple=True, required=True, metavar="COLUMN=VALUE", help="The key; once for each column."
)
@FLOW
@click.option("--as-of", type=POINT_IN_TIME,
              help="The epoch of the value, or a time: as it was then. [default: the last sealed one]")  # fmt: skip
@click.option("--branch", default="main", show_default=True, help="Which branch.")
@click.option("--limit", type=click.IntRange(min=0), default=10, show_default=True, help="Rows to show of each source.")
@CORES
@JSON
def explain(
    path: Path, stage: str, keys: Sequence[str], flow_name: str, as_of: AsOf | None, branch: str, limit: int,
    cores: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Say why a key of STAGE has its value: which input rows, at which epochs, led to it. Changes nothing.

    \b
      nosync explain state/ delays --key origin=JFK --key carrier=B6 --as-of 26 --flow my_job:make_flow
    """
    flow = _load_flow(flow_name, cores)
    with read_only(path) as store, store.held():
        key = parse_keys(store, stage, as_of, keys, branch) or {}
        with spark_session(cores) as spark:
            found = _explained(flow, store, spark, stage, key, as_of, branch, quiet=as_json)
    if as_json:
        print_json({
            "stage": stage, "key": key, "as_of": found.as_of, "value": found.value.to_pylist(), "exact": found.exact,
            "steps": [{"stage": s.stage, "kind": s.kind, "rows": s.rows.num_rows, "exact": s.exact, "notes": s.notes}
                      for s in found.steps],
            "inputs": {name: rows.to_pylist() for name, rows in found.inputs.items()},
        })  # fmt: skip
        return
    out.print(escape(str(found)))
    for name, rows in found.inputs.items():
        out.print(f"\n[bold]{escape(name)}[/]")
        show_rows(head(rows, limit), rows.num_rows)


def _explained(
    flow: nosync.Dataflow, store: Store, spark: SparkSession, stage: str, key: Mapping[str, Any], as_of: AsOf | None,
    branch: str, *, quiet: bool,
) -> nosync.Explanation:  # fmt: skip
    from nosync.job.explain import explain as trace_back  # noqa: PLC0415
    from nosync.job.flow_versions import bound_as_on, check_recorded_by  # noqa: PLC0415
    from nosync.spark.expressions import Analyzer, evaluator  # noqa: PLC0415
    from nosync.spark.schemas import parse_ddl  # noqa: PLC0415 - needs pyspark
    from nosync.spark.session import expression_settings  # noqa: PLC0415

    t = None if as_of is None else store.epoch_as_of(as_of, branch)
    at = store.last_sealed(branch) if t is None else t
    manifest = None if at is None else store.manifest(at, branch)
    if manifest is None:
        raise NotAvailableError(
            f"branch {branch} has no epoch{'' if at is None else f' {at}'}: nothing can be explained"
        )
    bound = bound_as_on(manifest, flow, store.refs, parse_ddl, Analyzer(spark, expression_settings(spark)))
    if stage in bound.stages:
        check_recorded_by(bound, manifest, stage)
    with progress("tracing back", quiet=quiet) as advance:
        return trace_back(
            bound, store, stage, key, t, evaluate=evaluator(spark, expression_settings(spark)), branch=branch,
            progress=lambda done, of: advance(done, of, "stages"),
        )  # fmt: skip


@cli.command()
@STORE
@FLOW
@click.option("--verify", is_flag=True, help="Read every byte first, so that flipped bits count as lost.")
@click.option("--branch", default="main", show_default=True, help="Which branch.")
@CORES
@ALONE
@JSON
def recover(
    path: Path, flow_name: str, verify: bool, branch: str, cores: int | None, alone: bool, as_json: bool
) -> None:
    """Recompute the layers that are lost, and nothing else. Exits 1 where some cannot be recovered.

    Where something is lost, a job that runs on the branch is stopped (FencedError): start it again afterwards.

    \b
      nosync recover state/ --flow my_job:make_flow --verify
    """
    flow, began_s = _load_flow(flow_name, cores), time.perf_counter()
    check_store(path)
    with nosync.open(path, alone=alone) as store:
        if verify:
            store.node.check()
        last, safe, lost = store.last_sealed(branch), store.safe_point(branch), store.node.lost(branch)
        missing = store.node.fetch(lost)
        gap = lost_manifest(store.node, branch)
    if last is not None and not missing:  # without a job, which would stop the one that runs
        took = {"inspect": time.perf_counter() - began_s}
        report = nosync.RecoveryReport(safe, last, len(lost), len(lost), 0, 0, gap, took)
    else:
        with _job(path, flow, branch, cores, alone=alone) as job, progress("recomputing", quiet=as_json) as advance:
            report = job.recover(verify=verify, progress=lambda done, of: advance(done, of, "epochs"))
        came = len(lost) - len(missing)
        report = dataclasses.replace(report, lost=report.lost + came, fetched=report.fetched + came)
    print_json(dataclasses.asdict(report)) if as_json else out.print(escape(str(report)))
    if report.unrecoverable:
        sys.exit(1)


@cli.command("spark-conf")
@JSON
def spark_conf(as_json: bool) -> None:
    """Print what spark-submit should be told, as options: how JVM and Python workers talk, how garbage is collected.

    \b
      spark-submit $(nosync spark-conf) my_job.py

    In a program nosync.configure_spark(SparkSession.builder) does the same. What spark-defaults.conf sets is left out,
    and so is what this machine's processor does not need: run it on one like your workers.
    """
    settings = launch_settings({})
    if as_json:
        print_json(settings)
    for name, value in () if as_json else settings.items():
        click.echo(f"--conf {name}={value}")
