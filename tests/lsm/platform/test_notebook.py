"""What a notebook shows of objects: their facts, with everything escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

import nosync
from nosync.job.replay import ReplayPlan, ReplayReport
from nosync.job.reports import EpochReport, RecoveryReport
from nosync.lsm.platform.notebook import rows_html


class Cells(HTMLParser):
    """The text of all cells, and every tag that occurs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


EVIL = "<script>alert(1)</script>"
OBJECTS: list[tuple[Any, list[str]]] = [
    (EpochReport(7, 1234, 8, 0, 5000, 0.5, 0.01, frozenset()), ["epoch 7", "rows_in", "1,234", "0.5"]),
    (
        RecoveryReport(3, 9, 2, 0, 1, 4, {EVIL: "lost"}, {"plan": 0.25}),
        ["recovery", "target", "9", EVIL, "lost", "seconds: plan", "0.25"],
    ),
    (ReplayPlan(EVIL, 4, 9, {"a": 12}, {"b": 6}), [f"replay of {EVIL}", "a", "12", "b", "6", "epochs"]),
    (ReplayReport("b", 4, 9, 12, 6, 1.5), ["layers_computed", "12", "1.5"]),
    (
        nosync.StoreStatus(EVIL, 128, 5, 6, 0, {"s": {"shards": 2, "layers": 3, "rows": 4, "bytes": 5000, "upper": 7}},
                           {"p": 1}, 0, {"x": EVIL}),
        [f"store {EVIL}", "safe point", "5", "5,000", "pin p", "problem: x"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "texts"), OBJECTS, ids=lambda x: type(x).__name__)
def test_objects_show_their_facts(shown: Any, texts: list[str]) -> None:
    cells = Cells(shown._repr_html_())
    for text in texts:
        assert text in cells.texts
    assert cells.tags <= {"div", "b", "table", "tr", "th", "td", "thead", "tbody", "caption", "p"}


def test_long_tables_are_cut() -> None:
    cells = Cells(rows_html(["n"], [[i] for i in range(50)], "fifty"))
    assert "19" in cells.texts
    assert "20" not in cells.texts
    assert "... 30 more of 50 rows" in cells.texts
    assert Cells(rows_html(["a"], [[None], [True], [0.00001234]])).texts == ["a", "true", "1.234e-05"]
