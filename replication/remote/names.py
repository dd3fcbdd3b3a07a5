"""What objects are called below the prefix of a remote. docs/format.md says what is in them.

NOSYNC.json                                   which store it is
nodes/<node>/claims/<claim>.json              who may write the log of this node; the greatest number counts
nodes/<node>/index/<claim>-<number>.index     all that was held after the pack of that number
nodes/<node>/packs/<claim>-<number>.pack      files, and what was added and dropped with them
nodes/<node>/objects/<claim>-<n>/<part>       a large file, in parts
nodes/<node>/unneeded/<claim>-<number>.json   since when objects are not needed, as a process said that ended
probe/<token>                                 made and deleted when a writer begins
"""

from __future__ import annotations

import re
from typing import NamedTuple

STORE, NODES, PROBE = "NOSYNC.json", "nodes", "probe"
EMBEDDED = "embedded"
"""The node of a store without a daemon."""
_CLAIM_DIGITS, _NUMBER_DIGITS, _PART_DIGITS = 8, 12, 6
_IN_LOG = re.compile(r"(?P<claim>\d{8})-(?P<number>\d{12})\.(?:index|pack)\Z")
_CLAIM = re.compile(r"(?P<claim>\d{8})\.json\Z")


class LogPosition(NamedTuple):
    """A place in the log of one node. Those of a later claim come after all of an earlier one."""

    claim: int
    number: int

    def __str__(self) -> str:
        return f"{self.claim:0{_CLAIM_DIGITS}}-{self.number:0{_NUMBER_DIGITS}}"

    @property
    def next(self) -> LogPosition:
        """Returns where the same writer writes next."""
        return LogPosition(self.claim, self.number + 1)


class NodeNames:
    """The names of what one node has in the bucket."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._root = f"{NODES}/{node}"
        self.claims, self.indexes = f"{self._root}/claims/", f"{self._root}/index/"
        self.packs, self.objects = f"{self._root}/packs/", f"{self._root}/objects/"
        self.unneeded = f"{self._root}/unneeded/"

    def claim(self, number: int) -> str:
        return f"{self.claims}{number:0{_CLAIM_DIGITS}}.json"

    def index(self, at: LogPosition) -> str:
        return f"{self.indexes}{at}.index"

    def pack(self, at: LogPosition) -> str:
        return f"{self.packs}{at}.pack"

    def unneeded_at(self, at: LogPosition) -> str:
        return f"{self.unneeded}{at}.json"

    def object(self, claim: int, n: int) -> str:
        """Returns what a large file is called, of which each part is an object."""
        return f"{self.objects}{claim:0{_CLAIM_DIGITS}}-{n:0{_NUMBER_DIGITS}}"


def part_name(name: str, part: int) -> str:
    """Returns what a part of a large file is called."""
    return f"{name}/{part:0{_PART_DIGITS}}"


def position_of(name: str) -> LogPosition | None:
    """Returns the place in the log that a pack or an index has; None for another name."""
    found = _IN_LOG.match(name.rpartition("/")[2])
    return None if found is None else LogPosition(int(found["claim"]), int(found["number"]))


def claim_of(name: str) -> int | None:
    """Returns the number of a claim; None for another name."""
    found = _CLAIM.match(name.rpartition("/")[2])
    return None if found is None else int(found["claim"])
