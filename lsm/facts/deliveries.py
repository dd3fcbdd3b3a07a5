"""Deliveries: which epochs a sink was given, so that a job that goes on, on whatever node, does not give them again.

A mark names the timeline that sealed the epoch: after a rewind the same number is another epoch. Which marks still hold
is said by the branches alone, so a manifest that is damaged or lost changes nothing.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from nosync.lsm.facts.or_set import Element, add_element, elements, remove, taken_back_by
from nosync.lsm.manifests.branches import Refs
from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import SINKS

_KEPT_EPOCHS = 1000
_OUTPUT_DIGITS = 12
"""A number of so many digits fits into 64 bits, which is what some outputs can keep of it."""
_OWED, _FIRST, _OUTPUT, _UNSENT = "_owed", "_first", "_output", "_unsent"
"""In the place of a timeline, whose ids are like `main` or the name of an entry: what is to be given again; the first
epoch that a sink is given; the numbers that sinks gave their output; what is marked and may not have been given in full.
"""
_NOT_TIMELINES = (_OWED, _FIRST, _OUTPUT, _UNSENT)


class DeliveryLog:
    """The deliveries of one sink on one store. `timeline`: the one that the job goes on with."""

    def __init__(self, root: Path, stage: str, timeline: str, refs: Refs, env: Env) -> None:
        self._root, self._env, self._timeline, self._refs = root, env, timeline, refs
        self._directory = PurePosixPath(SINKS, stage)
        self._held = refs.held_until(timeline)

    def delivered(self, t: int) -> bool:
        """Returns whether epoch `t` was marked."""
        return any(marked == t for marked in self._marked())

    def last(self) -> int | None:
        """Returns the newest epoch that was marked and is one of the timeline's; None: none was."""
        return max(self._marked(), default=None)

    def mark(self, t: int) -> None:
        """Marks an epoch as given to the sink. Durable when this returns."""
        timeline = self.line_of(t)
        add_element(self._root, self._directory / timeline, str(t), {"line": timeline, "t": t}, self._env)

    def line_of(self, t: int) -> str:
        """Returns the timeline that an epoch of the job's is sealed on."""
        return next(timeline for timeline in reversed(self._held) if self._holds(timeline, t))

    def left_after(self) -> int | None:
        """Returns the epoch after which another timeline that was marked goes a way of its own, the earliest; None:
        there is none.

        What was given for the epochs after it may be that of the other timeline, also where it was marked too long ago
        to be known.
        """
        lines = {timeline for timeline, _ in self._stale() if timeline in self._refs.timelines}
        return min((self.shared_until(line) for line in lines), default=None)

    def is_of(self, line: str, t: int) -> bool:
        """Returns whether an epoch that a timeline sealed is one of the job's."""
        return self._holds(line, t)

    def known_lines(self) -> list[str]:
        """Returns all timelines of the store, those that were left, too."""
        return [*self._refs.timelines]

    def shared_until(self, line: str) -> int:
        """Returns the last epoch that another timeline has in common with the job's; -1: none."""
        shared = self._refs.shared_until(line, self._timeline)
        return -1 if shared is None else shared

    def after(self, t: int) -> list[Element]:
        """Returns the marks of epochs after `t`, of whatever timeline."""
        return [element for timeline in self._timelines() for element in self._of(timeline) if int(element.what) > t]

    def _marked(self) -> list[int]:
        """Returns the epochs of the timeline."""
        return [
            int(element.what)
            for timeline in self._held
            for element in self._of(timeline)
            if self._holds(timeline, int(element.what))
        ]

    def _stale(self) -> list[tuple[str, Element]]:
        """Returns, with their timelines, the marks of epochs that are not, or no longer, the branch's."""
        return [
            (timeline, element)
            for timeline in self._timelines()
            for element in self._of(timeline)
            if not self._holds(timeline, int(element.what))
        ]

    def _holds(self, timeline: str, t: int) -> bool:
        if timeline not in self._held:
            return False
        end = self._held[timeline]
        return end is None or t <= end

    # --- what else is said of a sink -----------------------------------------------------------------------------

    def schedule_redelivery(self, after: int) -> Element:
        """The epochs after `after` are about to be others, and to be given again. Durable when this returns."""
        return add_element(self._root, self._directory / _OWED, str(after), {"after": after}, self._env)

    def pending(self) -> list[Element]:
        """Returns what `schedule_redelivery` said, until it is taken back."""
        return self._recent(_OWED, self.last())

    def begin(self, first: int) -> None:
        """The sink is new, and is given epochs from `first` on. Durable when this returns."""
        before = self._of(_FIRST)
        add_element(self._root, self._directory / _FIRST, str(first), {"first": first}, self._env)
        self.take_back(before)

    def first(self) -> int | None:
        """Returns what `begin` said last."""
        return max((int(element.what) for element in self._of(_FIRST)), default=None)

    def begin_sending(self, t: int) -> None:
        """Marks an epoch of which a part may be given from now on. Durable when this returns."""
        add_element(self._root, self._directory / _UNSENT, str(t), {"t": t}, self._env)
        self.mark(t)

    def unsent(self) -> list[Element]:
        """Returns what `begin_sending` said, until it is taken back."""
        return self._recent(_UNSENT, self.last())

    def last_sent(self) -> int | None:
        """Returns the newest epoch up to which all that was marked was given in full; None: there is none."""
        last = self.last()
        given = min([-1 if last is None else last, *(int(one.what) - 1 for one in self._recent(_UNSENT, last))])
        return None if given < 0 else given

    def withdraw(self, t: int) -> None:
        """The epochs after `t` are withdrawn. Durable when this returns.

        The marks up to `t` may be too old to be there. That there are later ones says that those before were given.
        """
        gone, first = self.after(t), self.first()
        has_older = any(marked <= t for marked in self._marked())
        if gone and t >= 0 and not has_older and (first is None or first <= t):
            self.mark(t)
        self.take_back([*gone, *(one for one in self.unsent() if int(one.what) > t)])

    def own(self) -> str:
        """Returns a new number for a sink's output, by which it is known again. Its record is durable when this returns."""
        output = str(int(self._env.token(), 16) % 10**_OUTPUT_DIGITS)
        add_element(self._root, self._directory / _OUTPUT, output, {"output": output}, self._env)
        return output

    def owns(self, output: str) -> bool:
        """Returns whether `own` said so, for this stage of this store."""
        return any(element.what == output for element in self._of(_OUTPUT))

    def take_back(self, marks: list[Element]) -> None:
        """Takes marks back. Durable when this returns."""
        for element in marks:
            remove(self._root, element, self._env)

    def _timelines(self) -> list[str]:
        with storage_errors("list", self._root / self._directory):
            return [name for name in self._env.list_dir(self._root / self._directory) if name not in _NOT_TIMELINES]

    def _recent(self, what: str, last: int | None) -> list[Element]:
        """Returns what was said, but for what is long before the newest mark: a node may have heard of that, and not that it
        was taken back.
        """
        return [element for element in self._of(what) if int(element.what) > (last or 0) - _KEPT_EPOCHS]

    def _of(self, timeline: str) -> list[Element]:
        return [
            element
            for element in elements(self._root, self._directory / timeline, self._env)
            if is_number(element.what)
        ]


def old_deliveries(paths: list[PurePosixPath]) -> list[PurePosixPath]:
    """Returns, of the files of all registers, those of epochs so long ago that nobody asks for them: marks, and what was
    begun, or owed, and taken back.
    """
    newest: dict[PurePosixPath, int] = {}
    numbers = {path: path.name.partition("-")[0] for path in paths if path.parts[0] == SINKS}
    epochs = {path: int(number) for path, number in numbers.items() if is_number(number)}
    for path, t in epochs.items():
        newest[path.parent] = max(t, newest.get(path.parent, t))
    old = [path for path, t in epochs.items() if t <= newest[path.parent] - _KEPT_EPOCHS]
    gone = {path: taken_back_by(path) for path in old if path.parent.name in (_UNSENT, _OWED)}
    pairs = {file for path, by in gone.items() if by in gone for file in (path, by)}
    return [path for path in old if path.parent.name not in _NOT_TIMELINES or path in pairs]
