"""What a store says of its epochs, against dictionaries: sealing, archiving, forking, cutting and opening in any order."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nosync
from nosync.lsm.layers.writer import arrange
from nosync.lsm.manifests.archive import Listed, Run
from nosync.lsm.manifests.completeness import is_whole
from nosync.lsm.manifests.manifest import Histories, Manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import ZERO, Epoch, epoch_of, pack, round_of
from nosync.lsm.node.node import Node
from tests.helpers.depth import examples

SETTINGS = nosync.StoreSettings(background=False, grace_s=0.0, archive_epochs=4)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("seal"), st.integers(1, 9), st.integers(0, 2)),
        st.tuples(st.just("archive"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("branch"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("delete"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    min_size=3,
    max_size=14,
)


@dataclass
class Model:
    """By branch, the manifests it has."""

    branches: dict[str, dict[int, Manifest]] = field(default_factory=lambda: {"main": {}})

    def histories(self, branch: str) -> dict[str, History]:
        histories = Histories()
        for t, manifest in sorted(self.branches[branch].items()):
            histories.add(pack(t), manifest.traces())
        return histories.all()


def seal(store: nosync.Store, branch: str, t: int, fingerprint: int) -> Manifest:
    """An epoch whose stage may have other code than the one before."""
    trace = TraceId("counts", blake3(f"{branch}{fingerprint}".encode()).hexdigest()[:8], Shard(0, 1))
    id = LayerId(trace, Description.of_epoch(t))
    store.directory.publish(id, arrange(pa.table({"k": [t]}), ["k"], whose="test"))
    meta: dict[str, object] = {"offset": t, "at_safe_point": {"rows": "drop"} if fingerprint else {}}
    return store.node.seal(t, [id], branch, meta, copies={"counts": fingerprint % 2})


def check(store: nosync.Store, model: Model, lines: Timelines) -> None:
    assert sorted(lines.refs.names) == sorted(model.branches)
    for branch, expected in model.branches.items():
        found = lines.manifests(branch)
        assert list(found) == sorted(expected)
        assert dict(found) == expected
        assert (found.first, found.last) == (min(expected, default=None), max(expected, default=None))
        assert {t for piece in found.pieces() for t in range(*_span(piece))} == set(expected)
        assert lines.histories(branch) == model.histories(branch)
    assert not lines.errors
    if model.branches["main"]:
        store.sync()
        assert store.safe_point() == max(model.branches["main"])


def _span(piece: object) -> tuple[int, int]:
    return (piece.t, piece.t + 1) if isinstance(piece, Manifest) else (piece.first, piece.last + 1)  # type: ignore[attr-defined]


@settings(max_examples=examples(60))
@given(steps, st.sampled_from([0, 3, 4]))
@example([("seal", 9, 0), ("seal", 9, 1), ("archive", 3, 0), ("rewind", 5, True), ("seal", 9, 2), ("reopen", 0, 0)], 0)
@example([("seal", 9, 0), ("archive", 1, 0)], 3)
@example([("seal", 3, 0), ("seal", 9, 1), ("look", 0, 0), ("archive", 2, 0), ("look", 0, 0)], 0)
@example([("seal", 6, 0), ("look", 0, 0), ("seal", 9, 0), ("archive", 1, 0)], 3)
@example([("seal", 9, 0), ("archive", 3, 0), ("branch", 2, 0), ("rewind", 1, False), ("seal", 9, 0), ("look", 0, 0)], 0)
def test_what_is_known_of_epochs(course: list[tuple[str, int, int]], first: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root, model = Path(directory) / "s", Model()
        store = nosync.open(root, settings=SETTINGS)
        looking = Timelines(root, store.directory.env)
        for number, (what, n, more) in enumerate(course):
            main = model.branches["main"]
            if what == "seal":
                for branch in model.branches if more == 2 else ["main"]:
                    known = model.branches[branch]
                    for _ in range(n):
                        t = max(known, default=first - 1) + 1
                        known[t] = seal(store, branch, t, more)
            elif what == "archive":
                store.sync()
                for _ in range(n):
                    assert isinstance(store.node, Node)
                    store.node.archive_manifests()
            elif what == "branch" and main:
                at = sorted(main)[n % len(main)]
                store.node.create_branch(f"b{number}", "main", at)
                model.branches[f"b{number}"] = {t: m for t, m in main.items() if t <= at}
            elif what == "rewind" and len(main) > 1:
                at = sorted(main)[n % (len(main) - 1)]
                store.rewind(at, keep_as="" if more else f"r{number}")
                model.branches["main"] = {t: m for t, m in main.items() if t <= at}
                if not more:
                    model.branches[f"r{number}"] = main
            elif what == "delete" and len(model.branches) > 1:
                name = sorted(set(model.branches) - {"main"})[n % (len(model.branches) - 1)]
                store.delete_branch(name)
                del model.branches[name]
            elif what == "look":
                looking.refresh()
                check(store, model, looking)
            elif what == "reopen":
                store.close()
                store = nosync.open(root, settings=SETTINGS)
        check(store, model, store.node.timelines)
        looking.refresh()
        check(store, model, looking)
        check(store, model, Timelines(root, store.directory.env))
        store.close()


ranges = st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 3]), st.integers(1, 5), st.sampled_from([0, 0, 3])).map(
    lambda r: Description(pack(r[0], r[1]), pack(r[0] + r[2], r[3]))
)


@given(
    st.lists(st.sets(ranges, max_size=5), min_size=1, max_size=2), st.integers(0, 9), st.integers(0, 5), st.booleans()
)
def test_what_merged_layers_stand_for(held: list[set[Description]], first: int, more: int, dropped: bool) -> None:
    traces = [TraceId(f"s{i}", "f", Shard(0)) for i in range(len(held))]
    listed = tuple(Listed(trace, ZERO, 1) for trace in traces)
    run = Run("main", Epoch(first), Epoch(first + more), listed, {"s0": "drop"} if dropped else {})

    def is_merged(d: Description) -> bool:
        return round_of(d.lower) == round_of(d.upper) == 0 and epoch_of(d.upper) - epoch_of(d.lower) > 1

    def expected(release: int) -> bool:
        return all(
            any(is_merged(d) and d.covers(Description.of_epoch(t)) for d in layers)
            for i, layers in enumerate(held)
            if not (dropped and i == 0 and first + more <= release)
            for t in range(first, first + more + 1)
        )

    of = dict(zip(traces, held, strict=True))
    for release in (-1, first + more - 1, first + more):
        assert is_whole(run, release, of.__getitem__) == expected(release)
