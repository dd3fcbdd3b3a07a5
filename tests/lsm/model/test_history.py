"""What a stage is made of where a span of its history replaces what was before."""

from __future__ import annotations

from pathlib import Path

import pytest

import nosync
from nosync.lsm.errors import SchemaError
from nosync.lsm.manifests.branches import CREATE, CREATE_REPLACING, ChangedStages, Refs, check_entry, creation
from nosync.lsm.manifests.manifest import Histories
from nosync.lsm.model.history import (
    Part,
    Span,
    View,
    check_not_replaced,
    continued,
    counting,
    replaced_at,
    view_at,
    views_of,
)
from nosync.lsm.model.layer import Shard, TraceId
from nosync.lsm.model.timestamp import Time, end_of, last_of, pack
from tests.helpers.daemons import publish

GROUPS = 128
OLD, NEW, NEXT = Span("f0", 1, pack(0), pack(4)), Span("f1", 1, pack(4), pack(6), replaces=True), Span("f2", 1, pack(6))
HISTORY = (OLD, NEW, NEXT)


def id_of(fingerprint: str) -> TraceId:
    return TraceId("s", fingerprint, Shard(0, 1))


def test_what_was_replaced_does_not_count() -> None:
    assert view_at(HISTORY, id_of("f1"), pack(4), GROUPS) == View(id_of("f1"), pack(4))
    assert view_at(HISTORY, id_of("f2"), pack(7), GROUPS) == View(
        id_of("f2"), pack(6), base=(Part(id_of("f1"), pack(4), pack(6)),)
    )
    assert view_at(HISTORY, id_of("f0"), pack(3), GROUPS) == View(id_of("f0"), pack(0)), "as of then it is what it was"
    for log in (True, False):
        assert [view.id for view in views_of(HISTORY, "s", pack(3), GROUPS, log=log)] == [id_of("f0")]
        assert [view.id for view in views_of(HISTORY, "s", pack(5), GROUPS, log=log)] == [id_of("f1")]
    assert [view.id for view in views_of(HISTORY, "s", pack(6), GROUPS, log=True)] == [id_of("f1"), id_of("f2")]
    assert [replaced_at(HISTORY, pack(t)) for t in (3, 4, 9)] == [None, pack(4), pack(4)]
    assert counting(HISTORY, Time(pack(4) - 1)) == (OLD,)


def test_it_is_replaced_before_anything_is_sealed() -> None:
    begun = continued((OLD,), "f1", 1, pack(4), replaces=True)
    assert begun == (OLD, Span("f1", 1, pack(4), replaces=True))
    assert continued(begun, "f1", 1, pack(4), replaces=True) == begun
    assert view_at(begun, id_of("f1"), pack(4), GROUPS).base == ()


def test_no_changes_lead_over_it() -> None:
    for after, until in ((-1, 3), (0, 3), (4, 9), (5, 6)):
        check_not_replaced(HISTORY, after, until, "stage s")
    check_not_replaced((NEW, NEXT), -1, 9, "stage s")  # nothing was before
    for after, until in ((-1, 4), (0, 9), (3, 4), (3, 9)):
        with pytest.raises(SchemaError, match=r"stage s.* from epoch 4 on.* up to 3, and for those after 4"):
            check_not_replaced(HISTORY, after, until, "stage s")


def test_manifests_say_which_stretch_replaced_what() -> None:
    parent = Histories()
    parent.add(pack(0), [(id_of("f0"), pack(0)), (TraceId("other", "g0", Shard(0, 1)), pack(0))])
    branch = parent.until(3, ["s"])
    for t in (4, 5):
        branch.add(pack(t), [(id_of("f1"), pack(4)), (TraceId("other", "g1", Shard(0, 1)), pack(4))])
    wide = [(TraceId("s", "f1", Shard(i, 2)), pack(6)) for i in range(2)]
    branch.add(pack(6), wide)
    spans = branch.of("s")
    assert [(span.lower, span.shard_count, span.replaces) for span in spans] == [
        (pack(0), 1, False), (pack(4), 1, True), (pack(6), 2, False),
    ]  # fmt: skip
    assert not any(span.replaces for span in branch.of("other"))
    assert branch.until(4).of("s") == (OLD, Span("f1", 1, pack(4), replaces=True)), (
        "a branch of it begins with the same"
    )
    assert parent.of("s") == (Span("f0", 1, pack(0)),)
    assert replaced_at(spans, last_of(9)) == end_of(3)


def test_a_branch_says_what_it_replaces_and_versions_that_do_not_know_it_refuse(tmp_path: Path) -> None:
    refs = Refs()
    plain, entry = (
        creation(refs, "b", "main", 3, ChangedStages(("s",), ("s",), replaced)) for replaced in ((), ("s",))
    )
    assert (plain["do"], entry["do"]) == (CREATE, CREATE_REPLACING)
    assert "replaced" not in plain
    assert refs.after(entry).timelines["b-1"].replaced == ("s",)
    with pytest.raises(ValueError, match="stage name"):
        check_entry({**entry, "replaced": ["../s"]})
    with nosync.open(tmp_path / "store") as store:
        for t in range(4):
            publish(store, t)
        store.node.create_branch("try", "main", 3, ChangedStages(("counts",), ("counts",), ("counts",)))
    with nosync.open(tmp_path / "store", read_only=True) as again:
        assert again.branches()["try"].replaced == ("counts",)


def test_a_branch_that_is_named_like_a_rewind_has_no_timeline_of_one() -> None:
    """Repair takes a timeline `rewind-<n>` for what main is since."""
    assert creation(Refs(), "rewind", "main", 3)["line"] == "branch-rewind-1"
    assert creation(Refs(), "rewind-1", "main", 3)["line"] == "rewind-1-1"
