"""Stages as they are declared: each is the handle to build more of the flow on. Without Spark and without data.

Every stage is a pure function of its inputs' changes at an epoch and its own state before it.

All operators take `persist=`, how well the stage's layers are kept (see `persistence`). The default is the flow's for
sources and keyed stages, `memory` for stateless ones, and `none` for those that run in the JVM and have consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from nosync.flow.arguments import (
    NO_ARGUMENTS,
    Arguments,
    ExpressionArguments,
    LoopArguments,
    StaticJoinArguments,
)
from nosync.flow.foreign_words import unknown_operator
from nosync.flow.key_names import check_key_names
from nosync.flow.keyed_operators import KeyedOperators
from nosync.flow.kinds import FILTER, LOOP, MAP, PART_SEPARATOR, SELECT, STATIC_JOIN, UNION, WHERE
from nosync.kernels.aggregates import Aggregate
from nosync.lsm.errors import FlowError
from nosync.lsm.manifests.manifest import KEEP

if TYPE_CHECKING:
    from nosync.flow.dataflow import Dataflow

MapFunction = Callable[[pa.Table], pa.Table]
FilterFunction = Callable[[pa.Table], Any]
LoopBody = Callable[["Stage"], "Stage"]


@dataclass(frozen=True)
class Stage(KeyedOperators):
    """The declaration of one stage, and the handle to build on it. Made by the methods of Dataflow and Stage."""

    flow: Dataflow = field(repr=False, compare=False)
    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    function: Callable[..., Any] | None = field(default=None, repr=False)
    schema: str | None = None
    """DDL: the columns of a source, the state columns of an update, or the output of a map where it cannot be inferred.
    """
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)
    version: str | None = None
    persist: str | None = None
    deterministic: bool = True
    arguments: Arguments = field(default=NO_ARGUMENTS, repr=False)
    """The arguments that only some kinds of stage have."""
    loop: str | None = None
    """The loop in whose body it was built."""
    at_safe_point: str = KEEP
    """The name of what is done with an epoch's rows of a source once everything computed from them is safe."""

    # --- stateless ------------------------------------------------------------------------------------------------

    def map(
        self,
        name: str,
        fn: MapFunction,
        *,
        schema: str | None = None,
        version: str | None = None,
        persist: str | None = None,
        deterministic: bool = True,
    ) -> Stage:
        """Applies a pure function to the rows of each shard and epoch: `fn(rows: pa.Table) -> pa.Table`.

        It may drop, change and add rows and columns. Each row must be treated by itself: how rows are cut into tables
        is not part of the contract. Over an input that changes (after aggregate or update) the table has a
        `_change_type` column that must be kept. `schema` (DDL) states the output where calling `fn` on an empty table
        cannot show it; `version` replaces the code in the fingerprint. `deterministic=False` is for functions that may
        return something else each time: what was recorded first counts, is durable before anything is computed from it,
        and is never computed again.
        """
        return self._then(
            name, MAP, function=fn, schema=schema, version=version, persist=persist, deterministic=deterministic
        )

    def flat_map(self, name: str, fn: MapFunction, **options: Any) -> Stage:
        """Does what `map` does: a synonym, for readers, where a function makes several rows of one."""
        return self.map(name, fn, **options)

    def filter(
        self,
        name: str,
        predicate: FilterFunction,
        *,
        version: str | None = None,
        persist: str | None = None,
        deterministic: bool = True,
    ) -> Stage:
        """Keeps the rows for which `predicate(rows: pa.Table)`, a boolean array of the same length, is true."""
        return self._then(
            name, FILTER, function=predicate, version=version, persist=persist, deterministic=deterministic
        )

    def select(self, name: str, *expressions: Any, persist: str | None = None) -> Stage:
        """Computes Spark expressions over each row, in the JVM: `select("priced", "item", "price * n AS total")`.

        Expressions are SQL text or Column objects, as for DataFrame.select. There is one row out for each row in: no
        aggregates, generators or random functions.
        """
        if not expressions:
            raise FlowError(f"stage {name}: give at least one column or expression")
        return self._then(name, SELECT, persist=persist, arguments=ExpressionArguments(tuple(expressions)))

    def where(self, name: str, condition: Any, *, persist: str | None = None) -> Stage:
        """Keeps the rows for which a Spark expression is true, run in the JVM: `where("big", "total > 100")`."""
        return self._then(name, WHERE, persist=persist, arguments=ExpressionArguments((condition,)))

    def union(self, name: str, *others: Stage, persist: str | None = None) -> Stage:
        """Unites the rows of this stage and of others with the same columns and types (UNION ALL)."""
        if not others:
            raise FlowError(f"stage {name}: give at least one other stage to unite with")
        self._check_siblings(name, others)
        return self._then(name, UNION, *others, persist=persist)

    def join_static(
        self, name: str, table: Any, *, on: Sequence[str], how: str = "inner", persist: str | None = None
    ) -> Stage:
        """Joins each row with a table, broadcast to the workers. `how` is inner or left.

        The table has the rows that it has when the job is made, and they are part of the stage's fingerprint: other rows are
        other code. Up to 10,000 are kept in the driver's memory. More are kept by Spark, which hashes them again before each
        use: where it lost some, and reads others in their place, that raises FlowError.
        """
        if how not in ("inner", "left"):
            raise FlowError(f"stage {name}: how={how!r}, expected 'inner' or 'left'")
        if not hasattr(table, "schema") or not hasattr(table, "join"):
            raise FlowError(f"stage {name}: {type(table).__name__} was given, expected a Spark DataFrame")
        arguments = StaticJoinArguments(table, check_key_names(name, on), how)
        return self._then(name, STATIC_JOIN, persist=persist, arguments=arguments)

    # --- loops ----------------------------------------------------------------------------------------------------

    def iterate(self, name: str, body: LoopBody, *, max_rounds: int = 1000, persist: str | None = None) -> Stage:
        """Computes the smallest set of rows that holds this stage's rows and all that `body` derives from rows of the
        set.

            def follow(reached):
                return reached.join("hops", edges, on=["node"]).map("next", to_node)

            reached = roots.iterate("reached", follow)

        `body` gets the set as a stage and returns one with the same columns, built from it and from stages outside with
        map, flat_map, filter, select, where, union and inner join: what more rows can only add to. Rows are a set; all
        columns must be usable as keys. Kept up to date with every epoch, deletions included (nosync.operators.loops);
        each round is a Spark job. A fixpoint that takes more than `max_rounds` rounds is an error.
        """
        if isinstance(max_rounds, bool) or not isinstance(max_rounds, int) or max_rounds < 1:
            raise FlowError(f"stage {name}: max_rounds={max_rounds!r}, expected a number of rounds, 1 or more")
        if self.flow._loop is not None:
            raise FlowError(f"stage {name}: a loop inside the loop {self.flow._loop} is not possible")
        variable = self._then(name, LOOP, persist=persist, arguments=LoopArguments(max_rounds))
        self.flow._loop = name
        try:
            result = body(variable)
        finally:
            self.flow._loop = None
        if not isinstance(result, Stage) or result.flow is not self.flow:
            raise FlowError(
                f"stage {name}: the loop's body returned {result!r}, expected a stage of dataflow {self.flow.name}"
            )
        if result.loop != name:
            raise FlowError(f"stage {name}: the loop's body returned {result.name}, which it did not build")
        return self.flow._changed(replace(variable, arguments=LoopArguments(max_rounds, result.name)))

    # ----------------------------------------------------------------------------------------------------------------

    def __getattr__(self, word: str) -> Any:
        if word.startswith("_"):  # what Python and notebooks ask of any object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {word!r}")
        raise unknown_operator(f"stage {self.name}", word, own_methods(Stage))

    def _then(self, name: str, kind: str, *others: Stage, **fields: Any) -> Stage:
        inputs = (self.name, *(other.name for other in others))
        return self.flow._add(Stage(self.flow, name, kind, inputs, **fields))

    def _part(self, part: str, index: int) -> Stage:
        """Returns the stage that is a part of this one. It has rows of the input of that number."""
        return Stage(self.flow, f"{self.name}{PART_SEPARATOR}{part}", MAP, (self.inputs[index],))

    def _check_siblings(self, name: str, others: Sequence[Stage]) -> None:
        for other in others:
            if not isinstance(other, Stage) or other.flow is not self.flow:
                raise FlowError(f"stage {name}: {other!r} is not a stage of dataflow {self.flow.name}")


def own_methods(kind: type) -> list[str]:
    """Returns the names of what users call on an object of a class."""
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
