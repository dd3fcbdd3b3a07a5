"""Inventories against sets of epochs, spelled out."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, epoch_of, pack
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, covers, in_order, missing
from nosync.replication.protocol.placement import NodeId, replica_set

TRACE = TraceId("s", "f", Shard(0))
ranges = st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 1)).map(
    lambda r: Description(pack(r[0]), pack(r[0] + r[1]), pack(r[2]))
)
layers = st.sets(ranges, max_size=8)


def held(d: Description) -> FileVersion:
    return FileVersion(FileName.of_layer(LayerId(TRACE, d)), f"digest of {d}", 1)


def manifest(first: int, last: int) -> FileName:
    return FileName(f"manifests/main/{first}.json" if first == last else f"manifests/main/{first}-{last}.json")


def epochs(of: set[Description]) -> set[int]:
    return {e for d in of for e in range(epoch_of(d.lower), epoch_of(Time(d.upper - 1)) + 1)}


@given(layers, ranges)
def test_covers(mine: set[Description], wanted: Description) -> None:
    assert covers(mine, wanted) == (epochs({wanted}) <= epochs(mine))


@given(layers, layers)
def test_what_is_missing_is_enough_and_not_what_is_there(mine: set[Description], theirs: set[Description]) -> None:
    found = missing(Inventory(map(held, mine)), Inventory(map(held, theirs)))
    fetched = {d for d in theirs if held(d) in found}
    assert epochs(mine | fetched) == epochs(mine | theirs)
    assert all(not epochs({d}) <= epochs(mine) for d in fetched)
    assert not any(a != b and epochs({a}) <= epochs({b}) for a in fetched for b in fetched)


@given(st.lists(st.tuples(st.booleans(), ranges), max_size=30))
def test_the_hash_depends_on_what_is_held_and_on_nothing_else(steps: list[tuple[bool, Description]]) -> None:
    inventory, expected = Inventory(), set()
    for add, d in steps:
        if add:
            inventory.add(held(d))
            expected.add(d)
        else:
            inventory.discard(held(d).name)
            expected.discard(d)
    assert inventory.root == Inventory(map(held, sorted(expected))).root
    assert set(inventory) == set(map(held, expected))
    assert set(inventory.layers(str(TRACE.directory))) == expected
    assert inventory.traces() == ([str(TRACE.directory)] if expected else [])
    if expected:
        other = Inventory([*map(held, sorted(expected)[1:]), FileVersion(held(min(expected)).name, "other")])
        assert other.root != inventory.root
        assert not other.holds(held(min(expected)).name, held(min(expected)).digest)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5)), max_size=20), st.integers(0, 12))
def test_an_archive_stands_for_the_epochs_in_it(steps: list[tuple[bool, int, int]], t: int) -> None:
    inventory, expected = Inventory(), set()
    for add, first, more in steps:
        name = manifest(first, first + more)
        if add:
            inventory.add(FileVersion(name, "d"))
            expected.add((first, first + more))
        else:
            inventory.discard(name)
            expected.discard((first, first + more))
    archives = {(first, last) for first, last in expected if first < last}
    assert inventory.has_archived(manifest(t, t)) == any(first <= t <= last for first, last in archives)
    for digest in ("d", "other"):
        alone = (t, t) in expected
        found = digest == "d" if alone else any(first <= t <= last for first, last in archives)
        assert inventory.holds(manifest(t, t), digest) == found
    assert not inventory.has_archived(FileName(f"manifests/other/{t}.json"))
    assert not inventory.has_archived(manifest(t, t + 1))
    singles = {f"manifests/main/{first}.json" for first, last in expected if first == last and t <= first <= t + 2}
    assert set(inventory.manifests_of(manifest(t, t + 2))) == singles


def test_a_manifest_comes_after_its_layers_and_the_log_first() -> None:
    others = [
        "manifests/main/10.json",
        "manifests/main/2.json",
        "branches/1.json",
        "branches/10.json",
        "branches/9.json",
    ]
    files = [FileVersion(FileName(name), "x") for name in [*others, "pins/p-0.json"]]
    files[2:2] = [held(Description(pack(first), pack(end))) for first, end in ((10, 11), (2, 3), (0, 3))]
    names = [file.name.rpartition("/")[2] for file in in_order(files)]
    assert names == [
        "1.json",
        "9.json",
        "10.json",
        "p-0.json",
        "0-3-0.layer",
        "2-3-0.layer",
        "2.json",
        "10-11-0.layer",
        "10.json",
    ]


def test_rendezvous_spreads_evenly_and_moves_little() -> None:
    nodes = [NodeId(f"n{i}") for i in range(5)]
    traces = [str(PurePosixPath("s", "f", f"{i}of999")) for i in range(999)]
    chosen = {trace: replica_set(trace, nodes, 2) for trace in traces}
    counts = Counter(node for of in chosen.values() for node in of)
    assert all(300 < counts[node] < 500 for node in nodes), counts
    for trace in traces:
        less = replica_set(trace, nodes[1:], 2)
        assert [node for node in chosen[trace] if node != nodes[0]] == less[
            : len([n for n in chosen[trace] if n != nodes[0]])
        ]
        assert replica_set(trace, reversed(nodes), 2) == chosen[trace]
