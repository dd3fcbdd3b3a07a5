"""Levels of persistence as texts: what they ask for."""

from __future__ import annotations

import pytest

import nosync
from nosync.flow.persistence import asks_for_remote, parse_level


@pytest.mark.parametrize(
    ("text", "copies", "remote"),
    [
        ("none", -1, False), ("memory", 0, False), ("disk", 1, False), (nosync.replicated(3), 3, False),
        (nosync.remote(), 1, True), (nosync.replicated(2, remote=True), 2, True),
    ],
)  # fmt: skip
def test_a_level(text: str, copies: int, remote: bool) -> None:
    assert parse_level(text, "it") == copies
    assert asks_for_remote(text) == remote


@pytest.mark.parametrize(
    "text", ["", "disk+remote", "remote+remote", "replicated(1)+remote", "replicated(2)remote", "Remote"]
)
def test_what_is_no_level(text: str) -> None:
    with pytest.raises(nosync.FlowError, match=r"nosync\.remote\(\)"):
        parse_level(text, "it")


def test_a_flow_asks_where_one_of_its_stages_does() -> None:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k string")
    assert not flow.asks_for_remote
    rows.aggregate("n", key=["k"], n=nosync.count(), persist=nosync.remote())
    assert flow.asks_for_remote
    assert nosync.Dataflow("g", persist=nosync.replicated(2, remote=True)).asks_for_remote
