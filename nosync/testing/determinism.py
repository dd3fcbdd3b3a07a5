"""Whether a flow gives the same for the same rows, however they come: what `FlowTester.assert_deterministic` tries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import ARRANGE
from nosync.flow.kinds import AGGREGATE, FILTER, IN_JVM, JOIN, MAP, PART_SEPARATOR, PER_KEY, SOURCE, UNION
from nosync.lsm.columnar.closeness import are_close
from nosync.lsm.errors import NosyncError

_INDEPENDENT_OF_CUTS = frozenset({SOURCE, MAP, FILTER, UNION, AGGREGATE, JOIN, PER_KEY, ARRANGE, *IN_JVM})
_SHUFFLES = 2


class Tester(Protocol):
    """Is a FlowTester, as far as it is known here."""

    @property
    def stages(self) -> list[str]:
        """Returns the stages that can be read."""

    def advance(self, rows: Mapping[str, Any] | None = None, *, t: int | None = None) -> object:
        """Runs an epoch."""

    def read(self, stage: str, as_of: int | None = None) -> pa.Table:
        """Returns the state of a stage."""

    def digests(self) -> dict[tuple[int, str, int], str]:
        """Returns the digests of all layers."""

    def close(self) -> None:
        """Removes what was recorded."""


@dataclass(frozen=True)
class Run:
    """Holds what was run, and how to run it again."""

    tester: Tester
    again: Callable[[int, Sequence[str]], Tester]
    """Makes a tester of the same flow with so many shards, and without some stages."""
    given: Sequence[Mapping[str, pa.Table]]
    first: int

    @property
    def last(self) -> int:
        return self.first + len(self.given) - 1


def check(run: Run, flow: BoundFlow, shards: int, *, cuts: bool) -> None:
    """Raises AssertionError naming the stage that gave something else, and what was other."""
    for seed in range(_SHUFFLES):
        _check_shuffled(run, shards, np.random.default_rng(seed))
    for other in {1, 3} - {shards}:
        if other <= flow.key_groups:
            _check_shards(run, other)
    if cuts:
        _check_cuts(run, flow, shards)


def _check_shuffled(run: Run, shards: int, random: np.random.Generator) -> None:
    shuffled = [
        {name: rows.take(pa.array(random.permutation(rows.num_rows))) for name, rows in epoch.items()}
        for epoch in run.given
    ]
    what = "with the rows of each epoch in another order"
    again = _ran(run, shards, shuffled, what)
    try:
        expected, found = run.tester.digests(), again.digests()
        order = {name: i for i, name in enumerate(run.tester.stages)}
        other = [at for at in expected if found.get(at) != expected[at]]
        for t, stage, _ in sorted(other, key=lambda at: (at[0], order.get(at[1], len(order)), at[2])):
            raise AssertionError(
                f"stage {stage} is not deterministic: {what} epoch {t} has other contents. Its function has to give the same "
                "for the same rows, whatever their order and whenever it is called: no clock, no random numbers, no order of "
                "rows or of a set"
            )
    finally:
        again.close()


def _check_shards(run: Run, shards: int) -> None:
    what = f"with {shards} shard{'s' if shards > 1 else ''}"
    again = _ran(run, shards, run.given, what)
    try:
        for t in range(run.first, run.last + 1):
            for stage in run.tester.stages:
                _check_same(
                    stage, run.tester.read(stage, t), again.read(stage, t), f"{what} it has other rows as of epoch {t}"
                )
    finally:
        again.close()


def _check_cuts(run: Run, flow: BoundFlow, shards: int) -> None:
    stages = [name for name in run.tester.stages if _is_independent(flow, name)]
    drop = [name for name in flow.stages if PART_SEPARATOR not in name and not _is_independent(flow, name)]
    together = [{name: pa.concat_tables([epoch[name] for epoch in run.given]) for name in run.given[0]}]
    apart = [part for epoch in run.given for part in _halves(epoch)]
    for epochs, what in ((together, "with all rows in one epoch"), (apart, "with each epoch cut in two")):
        again = _ran(run, shards, epochs, what, drop)
        try:
            last = run.first + len(epochs) - 1
            for stage in stages:
                _check_same(
                    stage, run.tester.read(stage, run.last), again.read(stage, last),
                    f"{what} it has other rows in the end; say cuts=False if it is to depend on epochs",
                )  # fmt: skip
        finally:
            again.close()


def _ran(
    run: Run, shards: int, epochs: Sequence[Mapping[str, pa.Table]], what: str, drop: Sequence[str] = ()
) -> Tester:
    again = run.again(shards, drop)
    try:
        for i, rows in enumerate(epochs):
            again.advance(rows, t=run.first + i)
    except NosyncError as error:
        again.close()
        raise AssertionError(f"{what} the flow fails: {error}") from error
    return again


def _halves(epoch: Mapping[str, pa.Table]) -> list[dict[str, pa.Table]]:
    middle = {name: (rows.num_rows + 1) // 2 for name, rows in epoch.items()}
    return [
        {name: rows.slice(0, middle[name]) for name, rows in epoch.items()},
        {name: rows.slice(middle[name]) for name, rows in epoch.items()},
    ]


def _is_independent(flow: BoundFlow, name: str) -> bool:
    """Returns whether what a stage holds in the end does not depend on the epochs by the kinds of what leads to it."""
    leads = [flow.stages[one] for one in (name, *flow.ancestors(name))]
    return all(stage.kind in _INDEPENDENT_OF_CUTS for stage in leads) and not any(stage.loop for stage in leads)


def _check_same(stage: str, expected: pa.Table, found: pa.Table, what: str) -> None:
    mine, theirs = (sorted(map(_text, rows.to_pylist())) for rows in (expected, found))
    if mine == theirs:
        return
    ours, others = expected.to_pylist(), found.to_pylist()
    if len(ours) == len(others) and all(map(are_close, ours, others)):
        return
    # As counts: of rows that are equal one side may have more.
    only = next(iter((Counter(theirs) - Counter(mine)) or (Counter(mine) - Counter(theirs))))
    raise AssertionError(f"stage {stage} is not deterministic: {what}. Among them is {only}")


def _text(row: Mapping[str, Any]) -> str:
    return repr(dict(row))
