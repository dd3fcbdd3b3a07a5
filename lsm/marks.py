"""Marks: which epochs a sink was given, so that a job that goes on, on whatever node, does not give them again.

A mark names the line that sealed the epoch: after a rewind the same number is another epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from nosync.lsm.env import Env, storage_errors
from nosync.lsm.registers import SINKS, Fact, add_fact, facts, take_back

_KEPT_EPOCHS = 1000
_OWED = "_owed"
"""In the place of a line, whose ids are like `main` or the name of an entry: what is to be given again."""


class Marks:
    """Those of one sink on one store. `line`: the one that the job goes on with; `line_of`: which one sealed an epoch."""

    def __init__(self, root: Path, stage: str, line: str, line_of: Callable[[int], str | None], env: Env) -> None:
        self._root, self._env, self._line, self._line_of = root, env, line, line_of
        self._directory = PurePosixPath(SINKS, stage)

    def delivered(self, t: int) -> bool:
        """Whether epoch `t` was marked."""
        return any(int(fact.what) == t for fact in self._of_line(self._sealed_by(t)))

    def last(self) -> int | None:
        """The newest epoch that was marked and is one of the line's; None: none was."""
        with storage_errors("list", self._root / self._directory):
            lines = self._env.list_dir(self._root / self._directory)
        marked = [(line, int(fact.what)) for line in lines if line != _OWED for fact in self._of_line(line)]
        return max((t for line, t in marked if self._line_of(t) == line), default=None)

    def mark(self, t: int) -> None:
        """Durable when this returns."""
        line = self._sealed_by(t)
        add_fact(self._root, self._directory / line, str(t), {"line": line, "t": t}, self._env)

    def stale(self, after: int) -> list[Fact]:
        """The marks of epochs after `after` that other lines sealed, or would have: the branch has left those lines.

        Epochs of this line that were given and then lost with a node stay marked: computed again, they are the same.
        """
        with storage_errors("list", self._root / self._directory):
            lines = self._env.list_dir(self._root / self._directory)
        others = [(line, fact) for line in lines if line not in (self._line, _OWED) for fact in self._of_line(line)]
        return [fact for line, fact in others if int(fact.what) > after and self._line_of(int(fact.what)) != line]

    def owe(self, after: int) -> Fact:
        """The epochs after `after` are about to be others, and to be given again. Durable when this returns."""
        return add_fact(self._root, self._directory / _OWED, str(after), {"after": after}, self._env)

    def owed(self) -> list[Fact]:
        """What `owe` said, until it is taken back."""
        return self._of_line(_OWED)

    def take_back(self, marks: list[Fact]) -> None:
        """Durable when this returns."""
        for fact in marks:
            take_back(self._root, fact, self._env)

    def _sealed_by(self, t: int) -> str:
        line = self._line_of(t)
        assert line is not None, "output is given when its epoch is sealed"
        return line

    def _of_line(self, line: str) -> list[Fact]:
        return [fact for fact in facts(self._root, self._directory / line, self._env) if fact.what.isdigit()]


def old_marks(paths: list[PurePosixPath]) -> list[PurePosixPath]:
    """Of the files of all registers, the marks of epochs so long ago that nobody asks for them."""
    newest: dict[PurePosixPath, int] = {}
    numbers = {path: path.name.partition("-")[0] for path in paths if path.parts[0] == SINKS}
    epochs = {path: int(number) for path, number in numbers.items() if number.isdigit()}
    for path, t in epochs.items():
        newest[path.parent] = max(t, newest.get(path.parent, t))
    return [path for path, t in epochs.items() if t <= newest[path.parent] - _KEPT_EPOCHS]
