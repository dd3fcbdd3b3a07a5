"""Stages that the JVM evaluates: select, where and joins with a static table.

They are checked when the job is made, on an empty DataFrame of the input's columns: Spark says what they return, and
what cannot be part of a recorded computation is refused.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from nosync.flow.arguments import ExpressionArguments, StaticJoinArguments, arguments_of
from nosync.flow.binder import Analysis, jvm_options
from nosync.flow.bound_stage import BoundStage, Evaluate
from nosync.flow.fingerprint import fingerprint, uses_modules
from nosync.flow.internal_columns import MATCHED_COLUMN
from nosync.flow.kinds import SELECT, STATIC_JOIN, WHERE
from nosync.flow.pickled_function import unpickled
from nosync.flow.stage import Stage
from nosync.flow.stage_options import ExpressionOptions, StageOptions, StaticJoinOptions
from nosync.kernels.expressions import Step
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN
from nosync.lsm.errors import FlowError, SchemaError
from nosync.spark.errors import without_log
from nosync.spark.expression_translation import step_of
from nosync.spark.schemas import check_fields
from nosync.spark.selecting import selected
from nosync.spark.session import ZONE, conf_set, contains, session_settings, turn_of, unusual
from nosync.spark.static_tables import check_same, rows_of
from nosync.spark.versions import arrow_schema

log = logging.getLogger("nosync")

_ALLOW_LOSS = "spark.sql.decimalOperations.allowPrecisionLoss"
_NOT_PLAIN = ("PYTHON_UDF", "SCALA_UDF", "CURRENT_LIKE")
"""What users' functions, and those that depend on when they are asked, are to Spark."""
_OF_MANY_ROWS = ("AGGREGATE", "GENERATE", "WINDOW")
_ADDRESS, _LAMBDA = re.compile(r"@[0-9a-f]{4,}"), re.compile(r"\b([xyz])_\d+\b")
"""In the text of a column: where an object lies, and how many lambdas this process has numbered before."""
_MOST_EXPRESSION_CHARACTERS = 4096
"""Of a stage that tasks may evaluate themselves."""
OF_TODAY = "it depends on when it is asked: add the time to the input"
_IS_TIME, _TODAY = re.compile("Date|Timestamp"), re.compile(r"\s*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Types of times, and texts that Spark casts to one which depends on the clock."""
_STAR = re.compile(r"[(,.]\s*\*")
_STAR_OF_ALL = re.compile(r"(^Column<'|[(,]\s*)\*(?=[),']|\s+AS\s)")
"""In the text of a Column object. One that multiplies goes on with a bracket."""
_NAMED = re.compile(r"(?P<text>.*\S)\s+AS\s+(?P<name>`(?:[^`]|``)+`|\w+)\s*\Z", re.IGNORECASE | re.DOTALL)

_COLUMN = re.compile(r"\s*(\w+|`(?:[^`]|``)+`)\s*\Z")
_COMMENT = re.compile(
    r"""(\b[rR]'[^']*'|\b[rR]"[^"]*"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)|--[^\n]*|/\*.*?\*/""", re.DOTALL
)
"""In SQL, or what could be taken for one: a text, or a name in quotes."""


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def hash_of(names: Sequence[str]) -> str:
    """Returns the hash of columns, which Spark computes as nosync.lsm.columnar.hashing.hash64 does."""
    return f"xxhash64({', '.join(map(quoted, names))})"


def place_of(source: BoundStage) -> str:
    """Returns the hash by which a source's rows are placed; that of all columns where nothing else is said."""
    names = source.schema.names
    if source.is_placed_by_columns:
        return hash_of(source.placed_by or names)
    condition = next((part[1:] for part in source.placed_by if part not in names and part[0] == "?"), None)
    parts = source.placed_by[:-1] if condition is not None else source.placed_by
    by_key = ", ".join(quoted(part) if part in names else f"({part[1:]}\n)" for part in parts)
    # Lazy: expressions are not asked of rows that do not pass, on which they may fail.
    return f"xxhash64({by_key})" if condition is None else f"IF({condition}, xxhash64({by_key}), {hash_of(names)})"


def jvm_rows(stage: BoundStage, rows: DataFrame, keep: Sequence[str]) -> DataFrame:
    """Returns what the stage's expressions make of `rows`. Rows that carry a report (in the last of `keep`) pass as
    they are.
    """
    if stage.changing:
        keep = [CHANGE_TYPE_COLUMN, *keep]
    made = [name for name in stage.rows_schema.names if name not in keep]
    report = keep[-1] if len(keep) > 1 else None
    return _apply(stage.kind, stage.options, rows, keep, report=report, made=made)


def expressions_over(stage: BoundStage, rows: DataFrame, keep: Sequence[str]) -> DataFrame:
    """Returns what the stage's expressions make of rows without reports, with the columns of `keep` beside it."""
    return _apply(stage.kind, stage.options, rows, keep, report=None)


def _apply(
    kind: str, options: StageOptions, rows: DataFrame, keep: Sequence[str], report: str | None, made: Sequence[str] = ()
) -> DataFrame:
    """Applies a stage. `report`: the column that says which rows carry a report; `made`: the columns that a select then
    makes of the others.
    """
    if isinstance(options, StaticJoinOptions):
        return _joined(options, rows, keep, report)
    assert isinstance(options, ExpressionOptions), kind
    texts = _texts(kind, options.expressions, keep, report, made)
    if texts is not None:
        return selected(rows, texts) if kind == SELECT else rows.where(texts[0])
    kept = [F.col(name) for name in keep]
    if kind == SELECT:
        every = [F.col(quoted(name)) for name in rows.columns if name not in keep]
        chosen = [column for e in options.expressions for column in (every if is_star(e) else [_column(e)])]
        if report is not None and len(chosen) == len(
            made
        ):  # not where an expression such as "s.*" makes several columns
            is_row = F.col(report).isNull()
            # Columns of a report are null, on which an expression may fail.
            chosen = [F.when(is_row, column).alias(name) for column, name in zip(chosen, made, strict=True)]
        return rows.select(*chosen, *kept)
    assert kind == WHERE, kind
    condition = _column(options.expressions[0])
    return rows.where(condition if report is None else F.when(F.col(report).isNull(), condition).otherwise(True))


def _texts(
    kind: str, expressions: Sequence[str | Column], keep: Sequence[str], report: str | None, made: Sequence[str]
) -> list[str] | None:
    """Returns as texts what a stage computes of rows some of which may carry a report: Spark is asked once for all of them,
    where it is asked some times for each Column. None: it takes Columns to say it.
    """
    texts = [e for e in expressions if isinstance(e, str) and not is_star(e) and "--" not in e and "/*" not in e]
    if report is None or len(texts) != len(expressions):
        return None
    is_row = f"{quoted(report)} IS NULL"
    if kind == WHERE:
        return [f"IF({is_row}, ({texts[0]}\n), TRUE)"]
    if len(texts) != len(made):
        return None
    found = [_guarded(text, name, is_row) for text, name in zip(texts, made, strict=True)]
    return None if None in found else [*map(str, found), *map(quoted, keep)]


def _joined(options: StaticJoinOptions, rows: DataFrame, keep: Sequence[str], report: str | None) -> DataFrame:
    """Returns the rows joined with a static table. Rows that carry a report stay as they are."""
    table: DataFrame = options.table
    check_same(table)
    on = list(options.on)
    columns = [name for name in rows.columns if name not in keep]
    added = [name for name in table.columns if name not in on]
    # A left join, so that reports, which match nothing, stay; inner is what matched of it.
    small = F.broadcast(table.withColumn(MATCHED_COLUMN, F.lit(True)))
    joined = rows.join(small, on, "left")
    if options.how == "inner":
        matched = F.col(MATCHED_COLUMN).isNotNull()
        joined = joined.where(matched if report is None else matched | F.col(report).isNotNull())
    return joined.select(*(F.col(quoted(name)) for name in (*columns, *added)), *(F.col(name) for name in keep))


def conditional(expression: str, name: str, condition: str) -> str:
    """Returns the expression where the condition holds, else null. It stays as it is where its name cannot be told from
    what it computes.
    """
    expression = _COMMENT.sub(lambda found: found[1] or " ", expression)
    return _guarded(expression, name, condition) or expression


def _guarded(expression: str, name: str, condition: str) -> str | None:
    """Returns what `conditional` does of an expression without comments; None where its name cannot be told."""
    match = _NAMED.match(expression)
    if _COLUMN.match(match["text"] if match else expression):
        return expression  # it cannot fail
    if match is None and (_STAR.search(expression) or re.search(rf"\s`?{re.escape(name)}`?\s*\Z", expression)):
        return None
    return f"IF({condition}, ({match['text'] if match else expression}\n), NULL) AS {quoted(name)}"


def is_star(expression: str | Column) -> bool:
    """Returns whether it stands for all columns of the input, without those of nosync beside them."""
    return isinstance(expression, str) and expression.strip() == "*"


def _column(expression: str | Column) -> Column:
    return F.expr(expression) if isinstance(expression, str) else expression


def evaluator(spark: SparkSession, settings: Mapping[str, str]) -> Evaluate:
    """Returns a function that evaluates stages of expressions over tables on the driver. `settings`: what they mean, by
    `expression_settings`.
    """

    def evaluate(stage: BoundStage, rows: pa.Table, keep: Sequence[str]) -> pa.Table:
        kept = [*(n for n in (CHANGE_TYPE_COLUMN,) if stage.changing), *keep]
        with turn_of(spark), conf_set(spark, {**session_settings(), **settings}):
            out = _apply(stage.kind, stage.options, spark.createDataFrame(rows), kept, report=None).toArrow()
        return out.cast(pa.schema([*stage.rows_schema, *(rows.schema.field(name) for name in keep)]))

    return evaluate


class Analyzer:
    """Asks Spark about stages of expressions; made for one session."""

    def __init__(self, spark: SparkSession, settings: Mapping[str, str]) -> None:
        """`settings`: what expressions mean, by `expression_settings`."""
        self._spark, self._settings = spark, settings
        # A job binds its flow several times; the stage is kept, so that its id stays its own.
        self._known: dict[tuple[int, pa.Schema], tuple[Stage, Analysis]] = {}

    def __call__(self, stage: Stage, given: pa.Schema) -> Analysis:
        """Returns what nosync.flow.binder.Analyze asks for. Raises FlowError or SchemaError naming the stage."""
        at = (id(stage), given)
        if at not in self._known:
            with conf_set(self._spark, self._settings), without_log():
                self._known[at] = stage, self._ask(stage, given)
        return self._known[at][1]

    def _ask(self, stage: Stage, given: pa.Schema) -> Analysis:
        empty = self._spark.createDataFrame([], from_arrow_schema(given))
        keep = [CHANGE_TYPE_COLUMN] if CHANGE_TYPE_COLUMN in given.names else []
        try:
            if stage.kind == STATIC_JOIN:
                self._check_static(stage, empty)
            else:
                self._check_stars(stage)
            rows = _apply(stage.kind, jvm_options(stage), empty, keep, report=None)
            schema = arrow_schema(rows.schema)
            check_fields(rows.schema, f"stage {stage.name}")
            self._check_plan(stage, rows)
        except PySparkException as error:
            reason = str(error).strip().splitlines()[0]
            raise SchemaError(f"stage {stage.name}: Spark cannot evaluate it over its input: {reason}") from None
        described, plain = self._described(stage, rows), not contains(self._spark, analyzed(rows), *_NOT_PLAIN)
        # Of a long one Spark takes seconds to say what it is.
        is_short = stage.kind in (SELECT, WHERE) and len(described) <= _MOST_EXPRESSION_CHARACTERS
        step = self._step(stage, rows, given) if plain and is_short else None
        if stage.kind != SELECT:
            return Analysis(schema, described, {name: name for name in given.names}, {}, plain, step)
        computed = self._computed_columns(stage, empty, rows)
        return Analysis(schema, described, _kept_columns(empty, rows), computed, plain, step)

    def _step(self, stage: Stage, rows: DataFrame, given: pa.Schema) -> Step | None:
        """Returns the step that Python evaluates itself. Epochs run in UTC, and so constants are computed in it."""
        may_lose = self._settings.get(_ALLOW_LOSS, "true").lower() == "true"
        if self._spark.conf.get(ZONE) == "UTC":
            return step_of(analyzed(rows), self._spark._jvm, may_lose_digits=may_lose)
        with conf_set(self._spark, {ZONE: "UTC"}):
            empty = self._spark.createDataFrame([], from_arrow_schema(given))
            keep = [CHANGE_TYPE_COLUMN] if CHANGE_TYPE_COLUMN in given.names else []
            rows = _apply(stage.kind, jvm_options(stage), empty, keep, report=None)
            return step_of(analyzed(rows), self._spark._jvm, may_lose_digits=may_lose)

    def _computed_columns(self, stage: Stage, given: DataFrame, rows: DataFrame) -> dict[str, str]:
        """Returns by column of a select the expression that computes it from columns of the input alone, not from other
        columns of the select.
        """
        texts = [
            _NAMED.match(e)
            for e in arguments_of(stage, ExpressionArguments).expressions
            if isinstance(e, str) and not _STAR.search(e)
        ]
        named = {_unquoted(match["name"]): match["text"] for match in texts if match}
        columns = analyzed(rows).projectList()
        found = {}
        for made in (columns.apply(i) for i in range(columns.size())):
            text = named.get(made.name())
            if text is None or made.getClass().getSimpleName() != "Alias" or contains(self._spark, made, *_NOT_PLAIN):
                continue
            with contextlib.suppress(PySparkException):
                alone = analyzed(given.selectExpr(f"({text}\n) AS alone")).projectList().apply(0)
                if alone.child().semanticEquals(made.child()):
                    found[made.name()] = text
        return found

    def _check_stars(self, stage: Stage) -> None:
        """Raises SchemaError for a star inside an expression: it takes all columns, and some beside those of the input
        are of nosync.
        """
        for e in arguments_of(stage, ExpressionArguments).expressions:
            if is_star(e) or "*" not in str(e):
                continue
            parser = self._spark._jsparkSession.sessionState().sqlParser()
            if _has_star(parser.parseExpression(e)) if isinstance(e, str) else _STAR_OF_ALL.search(text_of(e)):
                raise SchemaError(
                    f"stage {stage.name}: {e if isinstance(e, str) else text_of(e)!r}: a * inside an expression would take "
                    'columns of nosync, too: name the columns; the text "*" alone stands for all of the input'
                )

    def _check_plan(self, stage: Stage, rows: DataFrame) -> None:
        plan = analyzed(rows)
        if not plan.deterministic():
            raise FlowError(
                f"stage {stage.name}: its expression is not deterministic (rand, uuid, ...): it would be another one "
                "each time. Compute the value in a map with deterministic=False, or add it to the input"
            )
        if stage.kind == STATIC_JOIN:
            return
        if contains(self._spark, plan, *_OF_MANY_ROWS):
            raise FlowError(
                f"stage {stage.name}: aggregates, generators (explode) and window functions are not expressions over "
                "one row: use aggregate, flat_map or window"
            )
        if contains(self._spark, plan.child(), "FILTER"):
            raise FlowError(
                f"stage {stage.name}: window() and session_window() drop rows whose time is null, before the expression is asked "
                "of them: use the stage window(), or flow.sql"
            )
        is_of_today = contains(self._spark, plan, "CAST") and _any_of_today(plan.expressions())
        if is_of_today or contains(self._spark, plan, "CURRENT_LIKE"):
            raise FlowError(
                f"stage {stage.name}: its expression depends on when, or by whom, it is asked (current_timestamp, ...): computed "
                "again it would be another one. Add the value to the input"
            )
        if contains(self._spark, plan, "PLAN_EXPRESSION"):
            raise FlowError(
                f"stage {stage.name}: a subquery reads what its table is at the moment: join() with a static table, whose rows "
                "count as code, or with a source"
            )

    def _check_static(self, stage: Stage, rows: DataFrame) -> None:
        join = arguments_of(stage, StaticJoinArguments)
        table: DataFrame = join.table
        for name in join.on:
            for side, columns in (("its input", rows.columns), ("the table", table.columns)):
                if name not in columns:
                    raise SchemaError(
                        f"stage {stage.name}: join column {name!r} is not in {side} ({', '.join(columns)})"
                    )
        clash = [n for n in table.columns if n in rows.columns and n not in join.on]
        if clash:
            raise SchemaError(
                f"stage {stage.name}: the table and its input both have a column {clash[0]!r}: rename one"
            )
        if not analyzed(table).deterministic():
            raise FlowError(f"stage {stage.name}: the table is computed with random functions: write it out first")

    def _described(self, stage: Stage, rows: DataFrame) -> str:
        if stage.kind != STATIC_JOIN:
            texts = [
                e if isinstance(e, str) else text_of(e) for e in arguments_of(stage, ExpressionArguments).expressions
            ]
            return "; ".join([*texts, *self._functions(rows), *unusual(self._settings)])
        join = arguments_of(stage, StaticJoinArguments)
        table: DataFrame = join.table
        return f"{join.on} {join.how} {table.schema.simpleString()} {rows_of(table)}"

    def _functions(self, rows: DataFrame) -> list[str]:
        """Returns what Spark sends to workers of the Python functions in expressions: their names say nothing of their
        code.
        """
        if not contains(self._spark, analyzed(rows), "PYTHON_UDF"):
            return []
        waiting, found = [analyzed(rows).expressions()], []
        while waiting:
            several = waiting.pop()
            for one in (several.apply(i) for i in range(several.size())):
                if one.getClass().getSimpleName() == "PythonUDF":
                    found.append(code_of(one))
                waiting.append(one.children())
        return sorted(found)


def code_of(function: Any) -> str:
    """Returns a fingerprint of a Python function in an expression: of what Spark sends to workers, and of the code of the
    user's modules that this only names.
    """
    command = function.func().command()
    sent = bytes(command.apply(i) % 256 for i in range(command.size()))
    try:
        found, *_ = unpickled(sent)
        return fingerprint(sent, found) if uses_modules(found) else fingerprint(sent)
    except Exception as error:  # noqa: BLE001 - of what only workers have, say, or what cannot be told apart
        log.warning("of the function %s only what Spark sends of it is compared: %s", function.name(), error)
        return fingerprint(sent)


def _has_star(expression: Any) -> bool:
    """Returns whether a parsed expression takes all columns of its input; `s.*` takes those inside of one."""
    if expression.getClass().getSimpleName().startswith("UnresolvedStar") and not expression.target().isDefined():
        return True
    children = expression.children()
    return any(_has_star(children.apply(i)) for i in range(children.size()))


def text_of(column: Column) -> str:
    """Returns the text of a Column, without what is another number in each process: variables of one name are counted."""
    names: dict[str, dict[str, int]] = {}

    def renamed(found: re.Match[str]) -> str:
        of_name = names.setdefault(found[1], {})
        place = of_name.setdefault(found[0], len(of_name))
        return f"{found[1]}_{place or ''}"

    return _LAMBDA.sub(renamed, _ADDRESS.sub("@", str(column)))


def is_of_today(node: Any) -> bool:
    """Returns whether an expression of the JVM casts a text such as 'now' to a time. It is another one when it is asked again."""
    if node.getClass().getSimpleName() != "Cast" or not _IS_TIME.match(node.dataType().getClass().getSimpleName()):
        return False
    text = node.child()
    if not text.foldable() or text.dataType().getClass().getSimpleName().rstrip("$") != "StringType":
        return False
    try:
        # Spark looks at the value of a constant, however it is written.
        return _TODAY.match(str(text.eval(None))) is not None
    except (PySparkException, Py4JError):
        return False  # Spark does not know its value here


def _any_of_today(nodes: Any) -> bool:
    """`nodes`: expressions, as a sequence of the JVM."""
    each = [nodes.apply(i) for i in range(nodes.size())]
    return any(is_of_today(node) or _any_of_today(node.children()) for node in each)


def _kept_columns(given: DataFrame, rows: DataFrame) -> dict[str, str]:
    """Returns by column of a select the column of its input that it is, under this name or another."""
    columns, inputs = analyzed(rows).projectList(), analyzed(given).output()
    # By id: where a column is used beside its definition there are two projections, and the outer one's names are the inner's.
    names = {inputs.apply(i).exprId().id(): inputs.apply(i).name() for i in range(inputs.size())}
    kept = {}
    for i in range(columns.size()):
        column = columns.apply(i)
        value = column.child() if column.getClass().getSimpleName() == "Alias" else column
        if value.getClass().getSimpleName() == "AttributeReference" and value.exprId().id() in names:
            kept[column.name()] = names[value.exprId().id()]
    return kept


def analyzed(rows: DataFrame) -> Any:
    """Returns the plan of the JVM."""
    return rows._jdf.queryExecution().analyzed()
