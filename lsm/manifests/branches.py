"""Branches: names for timelines of sealed epochs, kept as a log of small files that are published whole and never
changed.

Invariants
- A *timeline* is a sequence of manifests. It begins with those of its parent up to the fork, and goes on with its own;
  nothing is copied, and nothing of the parent is ever edited.
- A *branch* is a name for a timeline. `main` is the first timeline, until another one is promoted: then the name moves.
- The log `branches/<n>.json` is the only truth about names. Each entry is published by linking it to the next number,
  so two writers cannot both be the n-th; what the log says after a crash is what it said before or after an entry.
- A timeline without a name is kept as far as a timeline with a name begins in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nosync.lsm.errors import CorruptionError, InvalidInputError
from nosync.lsm.manifests.manifest import MAIN_TIMELINE
from nosync.lsm.model.layer import check_name
from nosync.lsm.model.timestamp import Epoch, is_number, pack
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_small, read_small, sync_published
from nosync.lsm.platform.layout import BRANCHES
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.parsing import parsed

MAIN = "main"
CREATE, CREATE_REPLACING = "create", "create_replacing"
"""What entries do that make a branch. The second has stages that replace what was before: a version that does not know
that would read both together, so it has to refuse the entry.
"""
MOST_BRANCHES = 1000
"""So many a store has at most: looking at each of them takes time on every start."""


@dataclass(frozen=True)
class ChangedStages:
    """Says what a branch has in another way than its parent, by the names of stages."""

    changed: tuple[str, ...] = ()
    """Those with other code, and those that are gone."""
    anew: tuple[str, ...] = ()
    """Those of them that begin anew with the branch's first epoch, from all rows that are there."""
    replaced: tuple[str, ...] = ()
    """Those of these with another key or other columns: they are made of the branch's own layers alone."""

    def is_of(self, timeline: Timeline) -> bool:
        """Returns whether a timeline was made with these."""
        mine, its = (self.changed, self.anew, self.replaced), (timeline.changed, timeline.anew, timeline.replaced)
        return [{*names} for names in mine] == [{*names} for names in its]


SAME_CODE = ChangedStages()


@dataclass(frozen=True)
class Timeline:
    """Says where a timeline begins: at `at` of `parent`; the first one has no parent."""

    id: str
    parent: str | None = None
    at: Epoch | None = None
    changed: tuple[str, ...] = ()
    """The stages whose code is another one than the parent's."""
    own_states: bool = False
    """Changed stages that keep state are told apart by where they left the parent's; false in timelines of earlier
    versions.
    """
    anew: tuple[str, ...] = ()
    """Those of the changed stages that begin anew with the timeline's first epoch, from all rows that are there."""
    replaced: tuple[str, ...] = ()
    """Those of them with another key or other columns: they are made of their own layers alone."""


@dataclass(frozen=True)
class Refs:
    """Holds what the log says: timelines by id, and the timeline of each branch."""

    timelines: Mapping[str, Timeline] = field(default_factory=lambda: {MAIN_TIMELINE: Timeline(MAIN_TIMELINE)})
    names: Mapping[str, str] = field(default_factory=lambda: {MAIN: MAIN_TIMELINE})
    entries: int = 0
    later: tuple[int, ...] = ()
    """Entries that are there and do not count yet, because one before them is not: with peers it may be on its way."""
    _left: dict[str, dict[str, Epoch | None]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `left` found: it is asked for each branch, again and again."""

    def timeline_of(self, branch: str) -> Timeline:
        """Raises InvalidInputError naming the branches that there are."""
        if branch not in self.names:
            raise InvalidInputError(
                f"no branch {branch!r}; branches: {', '.join(sorted(self.names))}{did_you_mean(branch, self.names)}"
            )
        return self.timelines[self.names[branch]]

    def lineage(self, timeline: str) -> list[Timeline]:
        """Returns the timeline and its ancestors, oldest first."""
        found = [self.timelines[timeline]]
        while (parent := found[-1].parent) is not None:
            found.append(self.timelines[parent])
        found.reverse()
        return found

    def shared_until(self, a: str, b: str) -> Epoch | None:
        """Returns the last epoch that two timelines have in common; None: one is the other. After a rewind main begins
        in the timeline that it was.
        """
        mine, theirs = self.held_until(a), self.held_until(b)
        shared = [
            [end for end in (mine[timeline], theirs[timeline]) if end is not None]
            for timeline in mine
            if timeline in theirs
        ]
        return max((min(ends) for ends in shared if ends), default=None) if all(shared) else None

    def held_until(self, timeline: str) -> dict[str, Epoch | None]:
        """Returns the timeline and its ancestors, each with the last of its epochs that the timeline has, too; None: it
        has all of them.
        """
        found: dict[str, Epoch | None] = {}
        end: Epoch | None = None
        for step in reversed(self.lineage(timeline)):
            found[step.id] = end
            if step.at is not None:
                end = step.at if end is None else min(end, step.at)
        return found

    def left(self, timeline: str) -> dict[str, Epoch | None]:
        """Returns what `held_until` returns, oldest first, without the ancestors of which the timeline has no epoch:
        main may have been rewound to before one began, or to where it did.
        """
        known = self._left.get(timeline)
        if known is None:
            held = reversed(self.held_until(timeline).items())
            known = {id: end for id, end in held if end is None or (at := self.timelines[id].at) is None or end > at}
            self._left[timeline] = known
        return known

    def begins(self, timeline: str) -> dict[str, str]:
        """Returns where the code of each stage began that has other code than at the root of the timeline: the same
        text for the same state.

        What such a stage holds at an epoch depends on the state that it began with, so two branches may share its
        layers only where they left the same timeline at the same epoch.
        """
        steps = [self.timelines[id] for id in self.left(timeline)]
        return {stage: f"{step.parent}@{step.at}" for step in steps if step.own_states for stage in step.changed}

    def anew(self, timeline: str) -> dict[str, int]:
        """Returns the epoch at which each stage began anew that did so where it was changed last on the way to a
        timeline.
        """
        found: dict[str, int] = {}
        for step in (self.timelines[id] for id in self.left(timeline)):
            if step.at is not None:
                found = {stage: t for stage, t in found.items() if stage not in step.changed}
                found |= dict.fromkeys(step.anew, step.at + 1)
        return found

    def kept_until(self) -> dict[str, Epoch | None]:
        """Returns the timelines that are needed, and up to which epoch of their own; None: all of them."""
        kept: dict[str, Epoch | None] = dict.fromkeys(self.names.values())
        for name in self.names.values():
            for id, end in self.left(name).items():
                known = kept.setdefault(id, end)
                if known is not None and end is not None:
                    kept[id] = max(known, end)
        return kept

    def after(self, entry: Mapping[str, Any]) -> Refs:
        """Returns what the log says with one more entry. Raises KeyError, TypeError or ValueError for one that cannot
        follow.
        """
        timelines, names = dict(self.timelines), dict(self.names)
        if not isinstance(entry["name"], str) or entry["name"] == MAIN:
            raise ValueError(f"{entry['name']!r} is no name of a branch that is made or deleted")
        if "line" in entry:  # it becomes a directory; of names earlier versions took any
            check_name(entry["line"], "timeline name")
            pack(entry["at"])
        name = entry["name"]
        if entry["do"] in (CREATE, CREATE_REPLACING):
            timeline = entry["line"]
            if name in names or timeline in timelines or entry["parent"] not in timelines:
                raise ValueError(f"branch {name!r} or its timeline {timeline!r} is there already, or its parent is not")
            own_states = bool(entry.get("own_states"))
            anew, replaced = tuple(entry.get("anew", ())), tuple(entry.get("replaced", ()))
            timelines[timeline] = Timeline(
                timeline, entry["parent"], Epoch(entry["at"]), tuple(entry["changed"]), own_states, anew, replaced
            )
            names[name] = timeline
        elif entry["do"] == "rewind":
            if entry["line"] in timelines or entry["parent"] != names[MAIN] or entry["keep_as"] in names:
                raise ValueError(
                    f"timeline {entry['line']!r} or branch {entry['keep_as']!r} is there, or the parent is not main"
                )
            timelines[entry["line"]] = Timeline(entry["line"], entry["parent"], Epoch(entry["at"]))
            if entry["keep_as"]:
                names[entry["keep_as"]] = names[MAIN]
            names[MAIN] = entry["line"]
        elif entry["do"] == "delete":
            del names[name]
        elif entry["do"] == "promote":
            before = names[MAIN]
            names[MAIN] = names.pop(name)
            if entry["keep_as"]:
                names[entry["keep_as"]] = before
        else:
            raise ValueError(f"{entry['do']!r} is nothing that this version knows to do with branches")
        if len(names) > MOST_BRANCHES:
            raise ValueError(f"there are {len(names):,} branches, expected at most {MOST_BRANCHES:,}")
        return Refs(timelines, names, self.entries + 1)


def check_entry(entry: Mapping[str, Any]) -> None:
    """Names become directories, and entries come from other nodes too. Raises KeyError, TypeError or ValueError."""
    do = entry["do"]
    check_name(entry["name"], "branch name")
    if do not in (CREATE, CREATE_REPLACING, "delete", "promote", "rewind"):
        raise ValueError(f"{do!r} is none of {CREATE}, {CREATE_REPLACING}, delete, promote and rewind")
    if do in (CREATE, CREATE_REPLACING, "rewind"):
        check_name(entry["line"], "timeline name")
        check_name(entry["parent"], "timeline name")
        pack(entry["at"])
    if do in (CREATE, CREATE_REPLACING):
        for stage in (*entry["changed"], *entry.get("anew", ()), *entry.get("replaced", ())):
            check_name(stage, "stage name")
    if do in ("promote", "rewind") and entry["keep_as"]:
        check_name(entry["keep_as"], "branch name")
    if entry["name"] == MAIN:
        raise ValueError(f"{MAIN!r} is neither made nor deleted")


def read_refs(root: Path, env: Env) -> Refs:
    """Raises CorruptionError where an entry of the log is damaged."""
    refs = Refs()
    with storage_errors("list", root / BRANCHES):
        stems = [name.removesuffix(".json") for name in env.list_dir(root / BRANCHES) if name.endswith(".json")]
    numbers = sorted(int(stem) for stem in stems if is_number(stem))
    for number in numbers:
        if number != refs.entries + 1:
            return replace(refs, later=tuple(n for n in numbers if n >= number))
        path = root / BRANCHES / f"{number}.json"
        try:
            entry = read_small(path, env)
            with parsed("an entry of the log of branches", str(path)):
                _ = entry["do"], entry["name"] + ""
        except CorruptionError as error:
            raise CorruptionError(
                f"{error}: put it back, from a backup or another node; or say `nosync verify --repair {root}`, which first says "
                "what it will do"
            ) from error
        try:
            refs = refs.after(entry)
        except (KeyError, TypeError, ValueError):  # of a node that changed branches at the same time: not after ours
            return replace(refs, later=tuple(n for n in numbers if n >= number))
    return refs


def missing_entry(root: Path, refs: Refs) -> str:
    """Returns what to say where an entry is missing in the middle, or does not follow those before it."""
    path = root / BRANCHES / f"{refs.entries + 1}.json"
    if path.exists():
        return (
            f"{path}: cannot follow the entries before it, so branches stay as those say. Two nodes changed them at one time "
            "(`nosync conflicts` says which entries differ), or the file is not one of this store's: then remove it"
        )
    return (
        f"{path}: is missing, and entries after it are there ({', '.join(map(str, refs.later))}): which timeline is main "
        f"depends on it. Put it back, from a backup or another node; or say `nosync verify --repair {root}`, which first "
        "says what it will do"
    )


def append(root: Path, refs: Refs, entry: Mapping[str, Any], env: Env) -> Refs:
    """Adds an entry to the log, durably.

    Raises InvalidInputError where another process added one meanwhile, CorruptionError where one is missing.
    """
    if refs.later:
        raise CorruptionError(missing_entry(root, refs))
    check_entry(entry)
    after = refs.after(entry)
    path = root / BRANCHES / f"{refs.entries + 1}.json"
    if not publish_small(root, path, entry, env):
        raise InvalidInputError(f"{path}: another process changed the branches at the same moment; try again")
    sync_published(root, path, env)
    return after


def creation(refs: Refs, name: str, parent: str, at: int, stages: ChangedStages = SAME_CODE) -> dict[str, Any]:
    """Returns the entry that makes a branch. Raises InvalidInputError for a name that is taken or not possible."""
    check_name(name, "branch name")
    if len(refs.names) >= MOST_BRANCHES:
        raise InvalidInputError(
            f"cannot make branch {name!r}: there are {len(refs.names):,} branches, as many as a store may have; delete some"
        )
    if name in refs.names:
        raise InvalidInputError(f"branch {name!r} exists already; delete it or use another name")
    own = "branch-rewind" if name == "rewind" else name[:48]  # a rewind of main makes timeline rewind-<n>
    entry = {
        "do": CREATE, "name": name, "line": f"{own}-{refs.entries + 1}", "parent": parent, "at": at,
        "changed": sorted(stages.changed), "own_states": True, "anew": sorted(stages.anew),
    }  # fmt: skip
    if stages.replaced:
        entry |= {"do": CREATE_REPLACING, "replaced": sorted(stages.replaced)}
    return entry


def name_of_kept(refs: Refs, after: str, keep_as: str | None) -> str | None:
    """Returns the name of the branch that main is kept as; None where it is dropped. `after`: what main is left by."""
    if keep_as is not None and not isinstance(keep_as, str):
        raise InvalidInputError(f"keep_as is {keep_as!r}, expected the name of a branch, or '' to drop the line before")
    return f"before-{after}-{refs.entries + 1}" if keep_as is None else keep_as or None


def not_as_far(refs: Refs, branch: str, theirs: int | None, mine: int | None) -> str:
    """Says why a branch that has not come as far as main cannot be promoted."""
    common = refs.shared_until(refs.names[MAIN], refs.names[branch])
    back = "" if common is None else f"; or, where it is what main was before an upgrade, go back: rewind({common})"
    return f"branch {branch} is at epoch {theirs}, main at {mine}: replay() it first{back}"
