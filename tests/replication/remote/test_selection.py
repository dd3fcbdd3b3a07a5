"""Which layers go, and which are dropped: against an oracle that counts epochs."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Time, pack
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.remote.selection import MANY_FILES, not_needed, shrinking, uncovered

TRACE = TraceId("counts", "raw", Shard(0))


def layer(lower: int, upper: int, *, since: int = 0, digest: str = "a", size: int = 100) -> FileVersion:
    id = LayerId(TRACE, Description(pack(lower), pack(upper), Time(since)))
    return FileVersion(FileName.of_layer(id), digest, size)


def epochs_of(versions: list[FileVersion]) -> set[int]:
    found: set[int] = set()
    for version in versions:
        assert version.name.layer is not None
        d = version.name.layer.description
        found |= set(range(d.lower >> 20, d.upper >> 20))
    return found


LAYERS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda at: layer(at[0], at[0] + at[1])), max_size=12
)


@given(LAYERS, LAYERS)
def test_what_goes_covers_all_that_was_not_there(candidates: list[FileVersion], held: list[FileVersion]) -> None:
    found = uncovered(candidates, Inventory(held))
    assert epochs_of(found) | epochs_of(held) == epochs_of(candidates) | epochs_of(held)
    for one in found:  # and nothing goes that those before it cover
        assert not epochs_of([one]) <= epochs_of(held)


@given(LAYERS)
def test_of_what_is_there_in_pieces_the_pieces_go(candidates: list[FileVersion]) -> None:
    pieces = [layer(t, t + 1) for t in sorted(epochs_of(candidates))]
    assert set(uncovered([*candidates, *pieces], Inventory())) == set(pieces)


def test_what_is_on_its_way_is_not_taken_again() -> None:
    going = [layer(0, 1), layer(1, 2)]
    assert uncovered([layer(0, 2), layer(1, 2), layer(2, 3)], Inventory(), going) == [layer(2, 3)]


def test_other_contents_under_a_name_go_again() -> None:
    assert uncovered([layer(0, 1, digest="b")], Inventory([layer(0, 1)])) == [layer(0, 1, digest="b")]


def test_layers_of_rounds_never_go() -> None:
    id = LayerId(TRACE, Description(pack(1, 1), pack(1, 2)))
    assert uncovered([FileVersion(FileName.of_layer(id), "a", 1)], Inventory()) == []


def test_a_merged_layer_goes_where_it_takes_much_off() -> None:
    held = Inventory([layer(t, t + 1) for t in range(6)])
    for size, goes in ((200, True), (201, False)):
        merged = layer(0, 6, size=size)
        assert shrinking([merged], held, lambda name: False) == ([merged] if goes else [])
    assert shrinking([layer(0, 6, size=200)], held, lambda name: True) == []  # this node has them all the same
    many = Inventory([layer(t, t + 1) for t in range(MANY_FILES)])
    merged = layer(0, MANY_FILES, size=100 * MANY_FILES)
    assert shrinking([merged], many, lambda name: False) == [merged]
    assert shrinking([merged], Inventory([merged]), lambda name: False) == []


class OfTimelines:
    """Needs all epochs."""

    class refs:
        names: ClassVar[dict[str, str]] = {"main": "main"}

        @staticmethod
        def kept_until() -> dict[str, None]:
            return {"main": None}

    @staticmethod
    def histories(branch: str) -> dict[str, object]:
        return {}

    @staticmethod
    def sealed_until(trace: TraceId) -> int:
        return int(pack(1000))


def test_registers_that_others_stand_for_are_dropped_and_pins_are_not() -> None:
    names = [
        "jobs/main/1-a.json",
        "sinks/out/main/3-b.json",
        "checkpoints/q/offsets/1",
        "pins/p-c.json",
        "branches/1.json",
    ]
    held = Inventory(FileVersion(FileName(name), "x", 1) for name in names)
    for here, dropped in (
        ({names[0]}, names[1:2]),  # all of the checkpoint was on a disk that was lost
        ({names[0], "checkpoints/q/offsets/2"}, names[1:3]),
        ({names[0], "checkpoints/q.1/offsets/2"}, names[1:3]),
        ({names[0], "checkpoints/other/offsets/2"}, names[1:2]),
    ):
        assert sorted(not_needed(held, {}, here, OfTimelines(), None, END_OF_TIME)) == sorted(dropped)  # type: ignore[arg-type]


@given(LAYERS, LAYERS)
def test_what_is_dropped_is_covered_by_what_stays(held: list[FileVersion], here: list[FileVersion]) -> None:
    inventory, mine = Inventory(held), {str(one.name): one for one in here}
    dropped = set(not_needed(inventory, mine, set(), OfTimelines(), None, END_OF_TIME))  # type: ignore[arg-type]
    stays = [one for one in inventory if one.name not in dropped]
    assert epochs_of(stays) == epochs_of(list(inventory))
    assert not dropped & mine.keys()
    for one in stays:  # and no more stays than is needed, but for what is here
        others = [other for other in stays if other != one and one.name not in mine]
        assert not any(covers_all(other, one) for other in others)


def test_what_was_merged_past_the_epoch_that_is_whole_stands_for_nothing_yet() -> None:
    parts, merged = [layer(t, t + 1) for t in range(6)], layer(0, 6, since=pack(4))
    held = Inventory([*parts, merged])
    for exact, dropped in ((pack(3), []), (pack(4), [str(one.name) for one in parts]), (END_OF_TIME, parts)):
        found = not_needed(held, {str(merged.name): merged}, set(), OfTimelines(), None, exact)  # type: ignore[arg-type]
        assert sorted(found) == sorted(str(getattr(one, "name", one)) for one in dropped)
    older = layer(0, 3, since=pack(4))  # it does not serve that epoch either
    found = not_needed(Inventory([older, merged]), {}, set(), OfTimelines(), None, pack(3))  # type: ignore[arg-type]
    assert found == [str(older.name)]


def covers_all(one: FileVersion, other: FileVersion) -> bool:
    assert one.name.layer is not None
    assert other.name.layer is not None
    return one.name.layer.description.covers(other.name.layer.description)
