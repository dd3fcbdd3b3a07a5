"""Aggregates of one GROUP BY that one stage computes: what they take, what they are called, and what they answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nosync.kernels.aggregates import Aggregate
from nosync.spark.expressions import quoted
from nosync.spark.plans.catalyst import Node
from nosync.spark.plans.relation import Expression, named
from nosync.spark.plans.whole_groups import OfGroup


@dataclass
class Part:
    """Aggregates that are computed together, over a stage: names go by it, for groups of groups have such names already."""

    over: str
    beside: Collection[str] = ()
    """Columns of the aggregates over the same rows that are computed apart, as those with DISTINCT are."""
    arguments: dict[str, Expression] = field(default_factory=dict)
    """The columns that they take beside the key."""
    aggregates: dict[str, Aggregate] = field(default_factory=dict)
    of_group: dict[str, OfGroup] = field(default_factory=dict)
    types: dict[str, Node] = field(default_factory=dict)
    """The types of the answers about whole groups."""
    answers: list[tuple[Node, str, str]] = field(default_factory=list)
    """The calls of the query, each with the column and the text of its answer."""

    def takes(self, text: Expression) -> str:
        name = named("a", self.over, str(text))
        self.arguments[name] = text
        return name

    def has(self, aggregate: Aggregate) -> str:
        """Adds an aggregate. Returns its column, in quotes."""
        name = named(aggregate.function, self.over, repr(aggregate))
        if name in self.beside:  # over all rows, and over the distinct ones
            name = named(aggregate.function, self.over, repr(aggregate), "distinct")
        self.aggregates[name] = aggregate
        return quoted(name)

    def answers_by(self, call: Node, text: str, wanted: str | None) -> None:
        """Adds an answer, which is the column of an aggregate if its text says no more. That is called `wanted` then."""
        bare = next((name for name in self.aggregates if quoted(name) == text), None)
        if bare is None:
            self.answers.append((call, named("r", self.over, text), text))
            return
        if wanted is not None and not any(quoted(bare) in one for _, _, one in self.answers):
            # In its place, so that columns stay in the order of the query.
            self.aggregates = {wanted if name == bare else name: one for name, one in self.aggregates.items()}
            bare = wanted
        self.answers.append((call, bare, quoted(bare)))
