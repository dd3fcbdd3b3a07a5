"""Giving sinks what is sealed: each epoch's changes in order, also those that a job which died left out.

What was given is in marks (nosync.lsm.facts.deliveries), by timeline: a timeline that was rewound or replaced takes
back what it gave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.dataflow import Dataflow
from nosync.job.position import Position
from nosync.job.sinks import GAP, PRECISE, Sink, is_begun, last_given
from nosync.lsm.errors import CompactedError, FlowError, InvalidInputError, SchemaError, UnknownStageError
from nosync.lsm.facts.deliveries import DeliveryLog
from nosync.lsm.facts.or_set import Element
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("nosync")

PendingDeliveries = list[tuple[DeliveryLog, Element]]


def check_sinks(sinks: Mapping[str, Sink], flow: Dataflow) -> None:
    """Raises UnknownStageError, FlowError or InvalidInputError for what cannot be given anything."""
    names = [stage.name for stage in flow.stages]
    for stage, sink in sinks.items():
        of_stage, _, beside = stage.partition("__")
        if stage not in names and beside and of_stage in names:
            it = ".late" if beside == "late" else f".output({beside!r})"
            raise UnknownStageError(
                f"a sink is for {stage!r}, which stage {of_stage} makes beside its rows: give it a name of its own, as in "
                f"{it}.select('{of_stage}_{beside}', '*'), and that name the sink"
            )
        if stage not in names:
            raise UnknownStageError(
                f"a sink is for stage {stage!r}, which the flow does not have; stages: {', '.join(names)}"
                f"{did_you_mean(stage, names)}"
            )
        if next(s for s in flow.stages if s.name == stage).persist == "none":
            raise FlowError(f"stage {stage}: persist='none', so it has nothing that a sink could be given: persist it")
        if not callable(getattr(sink, "deliver", None)):
            raise InvalidInputError(
                f"stage {stage}: {sink!r} is no sink: give nosync.ParquetSink(path), nosync.CallbackSink(function) or an "
                "object with their methods"
            )


def check_columns(sinks: Mapping[str, Sink], flow: BoundFlow) -> None:
    """Raises InvalidInputError or SchemaError where a sink cannot have a stage's columns, or not beside its own."""
    for stage, sink in sinks.items():
        check = getattr(sink, "check_columns", None)
        if check is not None and stage in flow.stages:
            check(stage, flow.stages[stage].output)


def check_not_given(stages: Iterable[str], given: Collection[str]) -> None:
    """Raises SchemaError where a stage that gets another key or other columns has a sink. `given`: stages that have one."""
    stage = next((stage for stage in stages if stage in given), None)
    if stage is not None:
        raise SchemaError(
            f"stage {stage} gets another key or other columns, and a sink has the rows that it gave before, from which no "
            "changes lead to the new ones: give the new query another name, with a sink of its own; or make the job without "
            "this sink"
        )


class Delivery:
    """Gives the sinks of a job what was sealed on one timeline."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        store: Store,
        position: Position,
        changes: Callable[[str, int, int], DataFrame],
    ) -> None:
        """`changes(stage, after, until)`: the change feed of a stage."""
        self._sinks, self._store, self._position, self._changes = sinks, store, position, changes

    def marks(self, stage: str) -> DeliveryLog:
        directory = self._store.directory
        return DeliveryLog(
            directory.root, stage, self._position.timeline, self._store.node.timelines.refs, directory.env
        )

    def start(self, last: int | None) -> None:
        """Prepares sinks at a job's start, and gives those of main what is lacking. `last`: the last sealed epoch."""
        self._note_new(last)
        if last is not None and self._position.branch == MAIN:
            self._catch_up(last)

    def _note_new(self, last: int | None) -> None:
        """Notes for new sinks that they get the epochs from here on, also where the job dies before the first of them."""
        for stage, sink in self._sinks.items():
            if not hasattr(sink, "last_given"):
                continue
            marks = self.marks(stage)
            first, marked, given = marks.first(), marks.last(), last_given(sink, marks)
            next_epoch = 0 if last is None else last + 1
            was_given = first is not None and marked is not None and first <= marked
            is_new_output = given is None and was_given and not is_begun(sink, marks)
            if first is None or is_new_output or first > next_epoch:
                # What was given and has no first epoch is of versions that did not note it.
                marks.begin(self._first_epoch() if first is None and given is not None else next_epoch)

    def _catch_up(self, last: int) -> None:
        """Takes back what is of a timeline that main has left, and gives what is lacking."""
        self._withdraw(last)
        self._deliver_pending(last)
        self.deliver(last)

    def deliver(self, t: int) -> None:
        """Gives sinks an epoch, and before it those that a job which died, or a sink that failed, left out."""
        for stage, sink in self._sinks.items():
            marks = self.marks(stage)
            begins = self._begins(stage, marks)
            given = last_given(sink, marks)
            first = given + 1 if given is not None else t if begins is None else begins
            self._give(stage, sink, range(first, t + 1), marks)

    def schedule_redelivery(self, branch: str, common: int) -> PendingDeliveries:
        """Notes, before a branch is promoted, that sinks are to be given the epochs after `common` again.

        Raises CompactedError where their changes were merged away.
        """
        if self._sinks and common < self._store.since():
            raise CompactedError(
                f"cannot promote {branch}: its sinks would be given the epochs after {common} again, and history "
                f"before {self._store.since()} was merged away. Promote without sinks=, and give them a new output; hold a fork "
                "with pin(), or keep more with retain="
            )
        return [(marks := self.marks(stage), marks.schedule_redelivery(common)) for stage in self._sinks]

    def _give(self, stage: str, sink: Sink, epochs: range, marks: DeliveryLog) -> None:
        """Raises CompactedError, unless the sink may miss some, where the changes of an epoch were merged away."""
        oldest = self._store.since() + 1
        lost = epochs[: max(0, oldest - epochs.start)] if oldest > self._first_epoch() + 1 else range(0)
        if lost and getattr(sink, "guarantee", PRECISE) != GAP:
            raise CompactedError(
                f"stage {stage}: its sink was not given the epochs {lost.start} to {lost.stop - 1}, whose changes were merged "
                f"away: the oldest that can be given is {oldest}. Give it a new output, which begins with the next epoch; "
                "or for a CallbackSink that may miss some, make the job once with guarantee='gap'; a larger retain= keeps more"
            )
        if lost:
            log.warning("stage %s: its sink misses epochs that were merged away: %d to %d", stage, lost[0], lost[-1])
        for t in epochs[len(lost) :]:
            try:
                sink.deliver(lambda t=t: self._changes(stage, t - 1, t), t, marks)  # type: ignore[misc]
            except Exception as error:
                error.add_note(
                    f"the sink of stage {stage} failed at epoch {t}, which is sealed: nothing of it is lost, and the sink is "
                    "given it again before the next epoch, or when a Job is made anew"
                )
                raise

    def _first_epoch(self) -> int:
        first = self._position.manifests().first
        return 0 if first is None else first

    def _begins(self, stage: str, marks: DeliveryLog) -> int | None:
        """Returns the first epoch that a sink is given, kept from when it was new.

        Returns None for a sink that does not say what it has.
        """
        sink = self._sinks[stage]
        if not hasattr(sink, "last_given"):
            return None
        begins = marks.first()
        return self._first_epoch() if begins is None else max(begins, self._first_epoch())

    def _withdraw(self, last: int) -> None:
        """Takes back the epochs of a timeline that main has left since, maybe by a job without this sink."""
        for stage, sink in self._sinks.items():
            marks = self.marks(stage)
            left = marks.left_after()
            sink.withdraw(last if left is None else min(left, last), marks)

    def _deliver_pending(self, last: int) -> None:
        """Gives sinks the epochs that a promoted branch has in the place of others, also after a job that died
        meanwhile.
        """
        for stage, sink in self._sinks.items():
            marks = self.marks(stage)
            pending = marks.pending()
            if pending:
                after = min(int(element.what) for element in pending)
                sink.withdraw(after, marks)
                begins = self._begins(stage, marks)
                first = after + 1 if begins is None else max(after + 1, begins)
                self._give(stage, sink, range(first, last + 1), marks)
                marks.take_back(pending)
