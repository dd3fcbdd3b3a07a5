"""Declaring a view: its query is read by Spark, translated, and bound, so that what is wrong is told where it is said."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import cast

from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType, _parse_datatype_json_string

from nosync.flow.binder import bind
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.dataflow import Dataflow
from nosync.flow.internal_columns import is_kept
from nosync.flow.kinds import FINAL, PART_SEPARATOR
from nosync.flow.stage import Stage
from nosync.flow.tables import source_of
from nosync.flow.views import NoSessionError, View
from nosync.lsm.errors import FlowError, NosyncError
from nosync.spark.expressions import Analyzer, quoted
from nosync.spark.plans.catalyst import Node, Refused
from nosync.spark.plans.query import Analyzed, Planner
from nosync.spark.plans.translator import Translator
from nosync.spark.schemas import check_fields, parse_ddl
from nosync.spark.session import active_in_jvm, check_session, expression_settings

_NAME_OF_STAGE = re.compile(r"[a-z]+-[0-9a-f]{10}\Z")
"""How stages of views are called, those that could not be made included."""
_NO_TYPE = re.compile(
    r'^"(?:variant|time\([0-9]\)|interval (?:year|month)[a-z ]*)"$|'
    r'"(?:type|elementType|keyType|valueType)":"(?:variant|void|time\([0-9]\)|interval (?:year|month)[a-z ]*)"'
)
"""In the JSON of a type. Of VARIANT no values can be compared; VOID inside of others, TIME, and INTERVAL YEAR TO MONTH have no
type in Arrow.
"""
_INSTEAD = {
    "interval": "a number of months",
    "variant": "to_json(it), or its fields",
    "time(": "its text, CAST(it AS string)",
}
_NO_SESSION = (
    "Spark reads its query, and there is no session yet: make one before, as in "
    "SparkSession.builder.getOrCreate(), or give spark="
)


@dataclass(frozen=True)
class _Asked:
    """What Spark said of a flow's stages so far."""

    spark: SparkSession
    settings: dict[str, str]
    analyzer: Analyzer


def declare(flow: Dataflow, view: View, spark: SparkSession | Planner | None) -> View:
    """Adds the stages of a view to a flow. Returns the view as it is made.

    It is read by a session, or by a planner whose session is used for many views. Raises FlowError or SchemaError where
    its query cannot be read, or not be kept up to date.
    """
    planner = spark if isinstance(spark, Planner) else _planner(view.name, spark)
    spark = planner.spark
    inputs = _inputs(flow, planner, spark)
    try:
        analyzed = planner.analyze(view.name, view.query, inputs)
    except Refused as error:
        raise FlowError(f"view {view.name}: {error}") from None
    names = [name for _, name, _ in analyzed.columns]
    _check_names(view.name, names)
    _check_types(view.name, analyzed)
    translator = Translator(planner.session, planner, flow, inputs, view.emit)
    try:
        with active_in_jvm(planner.session):
            relation = translator.translate(analyzed)
        final = {name: quoted(relation.columns[i]) for i, name, _ in analyzed.columns}
        expressions = [text if text == quoted(name) else f"{text} AS {quoted(name)}" for name, text in final.items()]
        is_named = all(relation.columns[i] == name for i, name, _ in analyzed.columns)
        if not is_named or translator.stages.under(view.name, relation.stage, names) is None:
            relation.stage.select(view.name, *expressions, persist="memory")
    except Refused as error:
        raise FlowError(f"view {view.name}: {error}") from None
    except NosyncError as error:
        raise _of_view(error, view.name, translator.stages.made) from error
    made = (*translator.stages.made, view.name)
    _bound(flow, spark, view, made)
    columns = tuple((name, str(type_.sql())) for _, name, type_ in analyzed.columns)
    return replace(view, columns=columns, inputs=tuple(translator.used), stages=made, notes=tuple(translator.notes))


def _check_types(view: str, analyzed: Analyzed) -> None:
    """Raises FlowError for columns whose values Spark or Arrow cannot take apart or compare."""
    for _, name, type_ in analyzed.columns:
        match = _NO_TYPE.search(str(type_.json()))
        if match is not None:
            instead = next(
                (what for word, what in _INSTEAD.items() if word in match[0]),
                "it a type, as in CAST(array() AS array<int>)",
            )
            raise FlowError(f"view {view}: column {name} is {type_.sql()}, which cannot be recorded: give {instead}")
        check_fields(StructType().add(name, _parse_datatype_json_string(type_.json())), f"view {view}")


def _planner(view: str, spark: SparkSession | None) -> Planner:
    spark = spark or SparkSession.getActiveSession()
    if spark is None:
        raise NoSessionError(f"view {view}: {_NO_SESSION}")
    check_session(spark)
    return Planner(spark)


def _inputs(flow: Dataflow, planner: Planner, spark: SparkSession) -> dict[str, dict[str, Node]]:
    """Returns the stages that a view can name, which are those that users named, and registers them."""
    internal = {name for view in flow.views.values() for name in view.stages[:-1]}
    internal |= {source_of(stage.name) for stage in flow.stages}
    shown = [stage for stage in flow.stages if stage.name not in internal and stage.loop in (None, stage.name)]
    types = _types_of(flow, shown, spark)
    found = {}
    for stage in shown:
        planner.register(stage.name, types[stage.name])
        output = planner.session.table(quoted(stage.name))._jdf.schema()
        fields = [output.apply(i) for i in range(output.size())]
        found[stage.name] = {str(field.name()): field.dataType() for field in fields}
    return found


def _types_of(flow: Dataflow, stages: list[Stage], spark: SparkSession) -> dict[str, dict[str, str]]:
    """Returns Spark's types of stages' columns. What no text declares is what the bound flow says."""
    found: dict[str, dict[str, str]] = {}
    bound: BoundFlow | None = None
    for stage in stages:
        if stage.name in flow.views:
            found[stage.name] = dict(flow.views[stage.name].columns)
        elif not stage.inputs:
            found[stage.name] = _of_schema(cast("StructType", StructType.fromDDL(stage.schema or "")), spark)
        else:
            bound = bound or bind(flow, parse_ddl, _analyzer_of(flow, spark))
            found[stage.name] = _of_schema(from_arrow_schema(bound.stages[stage.name].output), spark)
    return found


def _analyzer_of(flow: Dataflow, spark: SparkSession) -> Analyzer:
    """Returns what asks Spark about a flow's stages. It asks about each once, and not anew for each view."""
    settings = expression_settings(spark)
    known = flow.asked
    if not isinstance(known, _Asked) or known.spark is not spark or known.settings != settings:
        known = flow.asked = _Asked(spark, settings, Analyzer(spark, settings))
    return known.analyzer


def _of_schema(schema: StructType, spark: SparkSession) -> dict[str, str]:
    """Returns types as SQL has them, with names of fields in quotes where they need some."""
    parse = spark._jsparkSession.parseDataType
    return {field.name: str(parse(field.dataType.json()).sql()) for field in schema}


def _check_names(view: str, names: list[str]) -> None:
    lower = [name.lower() for name in names]
    twice = next((name for i, name in enumerate(names) if name.lower() in lower[:i]), None)
    if twice is not None:
        raise FlowError(f"view {view}: two of its columns are named {twice!r}: give one another name with AS")
    ours = next((name for name in names if is_kept(name)), None)
    if ours is not None:
        raise FlowError(f"view {view}: column {ours!r}: names that begin with _ are kept for nosync: rename it with AS")


def _bound(flow: Dataflow, spark: SparkSession, view: View, made: tuple[str, ...]) -> None:
    """Binds the flow with the view's stages. What they cannot be is told of the view: their names say nothing to users."""
    try:
        bound = bind(flow, parse_ddl, _analyzer_of(flow, spark))
    except NosyncError as error:
        raise _of_view(error, view.name, made) from error
    if view.emit == FINAL and bound.stages[view.name].changing:
        raise FlowError(
            f'view {view.name}: its rows are to be given once and never taken back (emit="final", as in streaming tables), and '
            "this query takes rows back: group them by window(...) after withWatermark(...)"
        )


def _of_view(error: NosyncError, view: str, made: Container[str]) -> NosyncError:
    """Returns an error of one of a view's stages as one of the view. Their names say nothing to users."""
    mine = re.match(r"stage ([a-z0-9_-]+): ", str(error))
    if mine is None or (mine[1].partition(PART_SEPARATOR)[0] not in made and not _NAME_OF_STAGE.match(mine[1])):
        return error
    return FlowError(f"view {view}: {str(error)[mine.end() :]} (in its stage {mine[1]})")
