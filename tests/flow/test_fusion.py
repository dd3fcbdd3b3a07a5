"""Which sources are one task with the keyed stage after expressions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pyarrow as pa
import pytest

import nosync
from nosync.flow.arguments import ExpressionArguments, arguments_of
from nosync.flow.binder import Analysis, bind
from nosync.flow.bound_flow import BoundFlow
from nosync.flow.dataflow import Dataflow
from nosync.flow.kinds import WHERE
from nosync.flow.stage import Stage
from tests.helpers.runner import parse_ddl

ROWS = "a bigint, b bigint, v bigint"


def analyze(stage: Stage, given: pa.Schema) -> Analysis:
    """What Spark would say of `x`, `x AS y` and `1 + x AS y`."""
    if stage.kind == WHERE:
        return Analysis(given, "", {name: name for name in given.names})
    chosen = [
        re.split(" +AS +| +as +", expression + " AS ")[:2]
        for expression in arguments_of(stage, ExpressionArguments).expressions
    ]
    chosen = [(value, name.strip(" `")) for value, name in chosen]
    kept = {name or value: value for value, name in chosen if value in given.names}
    computed = {name: value for value, name in chosen if name and value not in given.names}
    return Analysis(pa.schema([(name or value, pa.int64()) for value, name in chosen]), str(chosen), kept, computed)


def declared(build: Callable[[Dataflow], object]) -> Dataflow:
    flow = nosync.Dataflow("f")
    build(flow)
    return flow


def fused(build: Callable[[Dataflow], object]) -> tuple[BoundFlow, list[set[str]]]:
    bound = bind(declared(build), parse_ddl, analyze).placed
    return bound, [set(s.stages) for s in bound.fused.segments.values() if s.fused]


def count(stage: Stage, name: str, key: str) -> Stage:
    return stage.aggregate(name, key=[key], **{f"n_{name}": nosync.count()})


def test_a_key_that_expressions_pass_on_under_another_name() -> None:
    bound, together = fused(
        lambda f: count(
            f.source("rows", ROWS).where("some", "v > 0").select("less", "b AS k", "1 + v AS w"), "counts", "k"
        )
    )
    assert together == [{"rows", "counts"}]
    assert bound.placements == {"rows": ("b",)}
    flow = declared(lambda f: count(f.source("rows", ROWS).where("some", "v > 0"), "counts", "b"))
    assert bind(flow, parse_ddl, analyze).placements == {"rows": ()}, "as manifests mean it that do not say"
    (segment,) = bound.fused.segments.values()
    assert [edge.jvm for edge in segment.edges] == [("some", "less")]
    assert not any(s.fused for s in bound.segments.values()), "recorded inputs take the longer way"


def test_sources_that_are_joined_by_what_they_have() -> None:
    def build(flow: Dataflow) -> None:
        left = flow.source("left", ROWS).select("l", "a AS k", "v AS x")
        left.join("both", flow.source("right", "k bigint, y bigint"), on=["k"])

    bound, together = fused(build)
    assert together == [{"left", "right", "both__left", "both__right", "both"}]
    assert bound.placements == {"left": ("a",), "right": ("k",)}


def test_what_is_in_its_shards_already_is_joined_there() -> None:
    def build(flow: Dataflow) -> None:
        people, sales = flow.source("people", ROWS), flow.source("sales", "k bigint, v bigint")
        sellers = sales.select("sold", "k").dedupe("sellers", key=["k"])
        sellers.join("both", people.select("named", "a AS k", "v"), on=["k"])
        count(sales, "direct", "k").join("further", sellers.aggregate("n", key=["k"], of=nosync.count()), on=["k"])

    bound, together = fused(lambda f: (build(f), count(f["both"].where("some", "v > 0"), "by_v", "v")))
    assert together == [
        {
            "people",
            "sales",
            "sellers",
            "n",
            "both__left",
            "both__right",
            "both",
            "direct",
            "further",
            "further__left",
            "further__right",
        }
    ]
    assert bound.placements == {"people": ("a",), "sales": ("k",)}
    first, second = bound.fused.segments.values()
    assert [edge.jvm for edge in first.edges] == [("sold",), ("named",)]
    assert [edge.output.stage for edge in second.edges] == ["both"], "each after those that feed it"


@pytest.mark.parametrize(
    ("build", "placed"),
    [
        (lambda s: s.select("more", "1 + a AS k", "b"), ("=1 + a",)),
        (lambda s: s.where("some", "v > 0 -- not all").select("more", "1 + a as k"),
         ("=1 + a", "?coalesce((v > 0 -- not all\n), FALSE)")),
        (lambda s: s.where("v", "a > 0").where("w", "b > 0").select("more", "1 + a  AS  `k`"),
         ("=1 + a", "?IF(coalesce((a > 0\n), FALSE), coalesce((b > 0\n), FALSE), FALSE)")),
    ],
    ids=["plain", "guarded", "guarded twice"],
)  # fmt: skip
def test_a_key_that_an_expression_computes(build: Callable[[Stage], Stage], placed: tuple[str, ...]) -> None:
    bound, together = fused(lambda f: count(build(f.source("rows", ROWS)), "counts", "k"))
    assert together == [{"rows", "counts"}]
    assert bound.placements == {"rows": placed}


@pytest.mark.parametrize(
    "build",
    [
        lambda f: count(f.source("rows", ROWS).select("more", "1 + a AS k").select("again", "k"), "counts", "k"),
        # Spark would ask the condition first, and the expression only of rows that fulfil it
        lambda f: count(f.source("rows", ROWS).select("more", "1 + a AS k").where("some", "k > 2"), "counts", "k"),
        # what is asked of the source as it is comes first
        lambda f: (count(s := f.source("rows", ROWS), "direct", "b"), count(s.where("some", "v > 0"), "counts", "a")),
        lambda f: count(f.source("rows", ROWS).where("some", "v > 0", persist="disk"), "counts", "a"),
        lambda f: count(f.source("rows", ROWS).where("some", "v IN (SELECT 1)"), "counts", "a"),
        lambda f: (s := f.source("rows", ROWS).where("some", "v > 0"), s.select("l", "a", "v").join("j", s, on=["a", "v"])),
        # two exits: the task would run twice
        lambda f: (
            count(count(f.source("rows", ROWS).where("some", "v > 0"), "by_a", "a").where("w", "n_by_a > 1"), "many", "n_by_a"),
            count(f["rows"].select("other", "1 + v AS k").select("again", "k"), "by_k", "k"),
        ),
        lambda f: (
            count(f.source("rows", ROWS).where("some", "v > 0"), "counts", "a"),
            f["rows"].select("start", "a", "b").iterate("loop", lambda rows: rows.select("next", "b AS a", "a AS b")),
        ),
    ],
    ids=["computed before", "condition after", "direct", "recorded", "subquery", "one source twice", "two exits", "loop"],
)  # fmt: skip
def test_what_stays_apart(build: Callable[[Dataflow], object]) -> None:
    bound, together = fused(build)
    assert together == []
    assert bound.placements == bind(declared(build), parse_ddl, analyze).placements, "no source is moved for nothing"
