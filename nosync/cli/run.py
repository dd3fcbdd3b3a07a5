"""The command that runs a project of Spark Declarative Pipelines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
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
    GivenPath,
    check_store,
    err,
    out,
    print_json,
    progress,
    table_of,
)
from nosync.cli.jobs import CORES
from nosync.cli.sessions import spark_session
from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from nosync.job.upgrade import UpgradePlan
    from nosync.pipelines.declaring import Pipeline
    from nosync.pipelines.recorded_inputs import Recorded
    from nosync.pipelines.running import RunReport
    from nosync.pipelines.spec import Spec


@cli.command()
@click.argument("project", metavar="[PROJECT]", required=False, type=GivenPath())
@click.option("--store", "path", type=GivenPath(), help="The store. [default: nosync/ in the storage of the spec]")
@click.option("--dry-run", is_flag=True, help="Only say what is defined, and what would become of it.")
@click.option("--branch", metavar="NAME", help="Read nothing new: ask what the definitions, as they are now, make of the "
              "recorded rows, on a branch of this name.")  # fmt: skip
@click.option(
    "--as-of", type=POINT_IN_TIME, help="The epoch where the branch forks, or a time. [default: before the last]"
)
@click.option("--retain", type=click.IntRange(min=1), help="Epochs of history to keep readable. [default: all]")
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    help="Shards of each dataset. [default: as they are; at first a core each, up to 4]",
)
@CORES
@ALONE
@JSON
def run(
    project: Path | None,
    path: Path | None,
    dry_run: bool,
    branch: str | None,
    as_of: AsOf | None,
    retain: int | None,
    shards: int | None,
    cores: int | None,
    alone: bool,
    as_json: bool,
) -> None:
    """Run a project of Spark Declarative Pipelines, with history: its tables are kept up to date as layers.

    PROJECT is its directory, or its spark-pipeline.yml; by default that of this directory, or of one above. A run takes
    what came since the one before, and ends. A dataset whose definition changed begins anew, over all rows that are
    recorded; a streaming table goes on. Each epoch can be read again. Needs pip install 'nosync[pipelines]'.

    \b
      nosync run shop/ --store state/ --dry-run
      nosync run shop/ --store state/
      nosync sql state/ "SELECT * FROM totals" --as-of 3
      nosync run shop/ --store state/ --branch stricter        # after an edit: what would it have been?
      nosync sql state/ "SELECT * FROM totals" --branch stricter
    """
    if as_of is not None and branch is None:
        raise click.UsageError("--as-of says where --branch forks: give --branch; nosync sql --as-of reads an epoch")
    if dry_run and (branch is not None or retain is not None):
        raise click.UsageError(f"--dry-run says what a run would do: it has no --{'branch' if branch else 'retain'}")
    if branch is not None and retain is not None:
        raise click.UsageError("--retain is for runs: a branch is kept until it is deleted")
    if branch is not None and shards is not None:
        raise click.UsageError("--shards is for runs: a branch has those of the epochs that it replays")
    try:
        from nosync.pipelines.spec import read_spec  # noqa: PLC0415 - only this command needs them
    except ImportError as error:
        raise NosyncError(f"this needs {error.name}: pip install 'nosync[pipelines]'") from error
    spec = read_spec(project)
    path = (path or _store_of(spec)).absolute()
    os.chdir(spec.root)  # before the JVM starts, for which paths in the project's files are relative to where it starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(spec.root), os.environ.get("PYTHONPATH")]))
    with spark_session(cores, spec.configuration) as spark:
        from nosync.pipelines.declaring import declare_project  # noqa: PLC0415

        pipeline = declare_project(spec, spark, _recorded(path, alone=alone))
        if dry_run:
            _show_plan(pipeline, path, alone=alone, as_json=as_json)
        elif branch is not None:
            check_store(path)
            with nosync.open(path, alone=alone) as store:
                _run_branch(pipeline, store, branch, as_of, as_json=as_json)
        else:
            with nosync.open(path, alone=alone, retain=retain) as store:
                _run(pipeline, store, shards, as_json=as_json)


def _store_of(spec: Spec) -> Path:
    scheme, colon, rest = spec.storage.partition(":")
    if colon and scheme != "file":
        raise InvalidInputError(f"{spec.path}: its storage is {spec.storage}, and a store is a directory: give --store")
    plain = "/" + rest.lstrip("/") if colon else spec.storage
    return spec.root / plain / "nosync"


def _run(pipeline: Pipeline, store: Store, shards: int | None, *, as_json: bool) -> None:
    from nosync.pipelines.running import Run  # noqa: PLC0415
    from nosync.spark.errors import without_log  # noqa: PLC0415

    with err.status("starting", spinner="line") as status:

        def say(text: str) -> None:
            first, *more = text.splitlines()
            if first.startswith("epoch") or more:
                if not as_json:
                    out.print(escape(text))
            else:
                status.update(escape(first))

        with without_log():
            report = Run(pipeline, store, shards, say).run()
    if as_json:
        print_json(_as_json(report))
        return
    if not report.epochs:
        last = store.last_sealed()
        out.print("nothing came" + ("" if last is None else f": the store is at epoch {last}"))
    _show_rows(pipeline, report)


def _run_branch(pipeline: Pipeline, store: Store, branch: str, as_of: AsOf | None, *, as_json: bool) -> None:
    from nosync.pipelines.running import branch_off  # noqa: PLC0415
    from nosync.spark.errors import without_log  # noqa: PLC0415

    at = None if as_of is None else store.epoch_as_of(as_of)
    with progress(f"replaying {branch}", quiet=as_json) as advance, without_log():
        plan, report = branch_off(pipeline, store, branch, at, lambda done, of: advance(done, of, "epochs"))
    if as_json:
        print_json({**_as_json(report), "plan": dataclasses.asdict(plan)})
        return
    out.print(escape(str(plan)))
    out.print(escape(str(report.replay)))
    _show_rows(pipeline, report)
    changed = [] if report.upgrade is None else [*report.upgrade.begins_anew, *report.upgrade.goes_on]
    shown = next((name for name in changed if name in report.rows), None)
    if shown is not None:
        out.print(f"compare: nosync diff {store.directory.root} {shown} main {branch}")


def _show_plan(pipeline: Pipeline, path: Path, *, alone: bool, as_json: bool) -> None:
    upgrade = _planned(pipeline, path, alone=alone)
    rows = [_described(pipeline, name) for name in pipeline.datasets]
    if as_json:
        print_json({
            "name": pipeline.spec.name, "store": str(path), "datasets": rows,
            "inputs": [{"name": one.name, "what": one.shown, "is_stream": one.is_stream} for one in pipeline.inputs],
            "upgrade": None if upgrade is None else dataclasses.asdict(upgrade),
        })  # fmt: skip
        return
    table = table_of("dataset", "kind", "reads", "stages>", "defined in")
    for row in rows:
        stages = "" if row["stages"] is None else str(row["stages"])
        table.add_row(row["name"], row["kind"], ", ".join(row["reads"]), stages, row["where"])
    out.print(table)
    if pipeline.inputs:
        inputs = table_of("input", "read as", "what it is")
        for one in pipeline.inputs:
            inputs.add_row(one.name, "stream" if one.is_stream else "table", one.shown)
        out.print()
        out.print(inputs)
    for row in rows:
        for note in row["notes"]:
            out.print(f"{row['name']}: {escape(note)}")
    out.print()
    out.print(escape(str(upgrade)) if upgrade is not None else f"{path} has no epoch yet: a run makes its first")


def _is_new(path: Path) -> bool:
    """Returns whether opening the path would make a store."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _recorded(path: Path, *, alone: bool) -> Mapping[str, Recorded]:
    from nosync.pipelines.recorded_inputs import recorded_stages  # noqa: PLC0415

    if _is_new(path):
        return {}
    with nosync.open(path, alone=alone) as store:
        return recorded_stages(store)


def _planned(pipeline: Pipeline, path: Path, *, alone: bool) -> UpgradePlan | None:
    from nosync.pipelines.running import planned_upgrade  # noqa: PLC0415

    if _is_new(path):
        return None
    with nosync.open(path, alone=alone) as store:
        return planned_upgrade(pipeline, store).plan


def _described(pipeline: Pipeline, name: str) -> dict[str, Any]:
    dataset, view = pipeline.datasets[name], pipeline.flow.views.get(name)
    return {
        "name": name,
        "kind": dataset.kind,
        "reads": pipeline.reads(name),
        "stages": None if view is None else len(view.stages),
        "where": dataset.where,
        "notes": [*dataset.notes, *(view.notes if view is not None else ())],
    }


def _show_rows(pipeline: Pipeline, report: RunReport) -> None:
    table = table_of("dataset", "kind", "rows>")
    for name, count in report.rows.items():
        table.add_row(name, pipeline.datasets[name].kind, f"{count:,}")
    out.print(table)


def _as_json(report: RunReport) -> Mapping[str, Any]:
    epochs = [{k: v for k, v in dataclasses.asdict(one).items() if k != "computed"} for one in report.epochs]
    return {
        "epochs": epochs,
        "rows": report.rows,
        "upgrade": None if report.upgrade is None else dataclasses.asdict(report.upgrade),
        "replay": None if report.replay is None else dataclasses.asdict(report.replay),
    }
