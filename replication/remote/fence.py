"""One writer for the log of each node in a bucket, and one store for a prefix.

Invariants
- `NOSYNC.json` is put once, and says which store the prefix is of. Another store is refused.
- The claims of a node are numbered, and each is put once. Who has the greatest one may write; whoever wrote something
  looks whether a greater one came since, and whether its own is still there, and only then counts it as held: a directory
  that is not mounted any more, or a prefix that somebody emptied, has no copies.
- A claim is taken over by the same life of a data directory (its incarnation), or by one that never had one before: a
  restored directory, or a rebuilt catalog. An incarnation that had one, and lost it to another, is an old one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from nosync.lsm.errors import CorruptionError, FormatVersionError, RemoteError
from nosync.lsm.platform.json_file import canonical
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.store_marker import Marker, check_key_groups
from nosync.replication.remote.bucket import Bucket, MissingObjectError
from nosync.replication.remote.names import STORE, NodeNames, claim_of, position_of

log = logging.getLogger("nosync.remote")

REMOTE_FORMAT = 1
_ATTEMPTS = 10


class RemoteTakenError(RemoteError):
    """Another store, or another life of this one, writes there."""

    by_this_directory = False
    """Another process of the same directory did: `nosync backup`, say, which ends."""


class GoneError(RemoteError):
    """What was copied is not there any more: the directory is not mounted, or the prefix was emptied."""


@dataclass(frozen=True)
class Claim:
    """Who may write the log of one node."""

    number: int
    store_id: str
    incarnation: str
    token: str
    """Of one start of one process."""
    host: str
    """For people: where that process ran."""
    earlier: tuple[str, ...] = ()
    """The incarnations that had the log before this one, and lost it."""
    is_damaged: bool = False
    """It is not known whose it is."""

    def who(self) -> str:
        """Returns what a message calls it."""
        number = f", claim {self.number}" if self.number else ""
        return f"incarnation {self.incarnation} (on {self.host}{number})"


def read_store(bucket: Bucket) -> Marker:
    """Returns which store a prefix is of. Raises RemoteError where it is of none, or FormatVersionError."""
    try:
        text = bucket.get(STORE)
    except MissingObjectError:
        raise RemoteError(
            f"{bucket.url}: no copies of a store are there ({STORE} is missing); is the prefix right?"
        ) from None
    fields = _fields(text, f"{bucket.url}/{STORE}")
    if fields["nosync_remote"] > REMOTE_FORMAT:
        raise FormatVersionError(
            f"{bucket.url}: is of remote format {fields['nosync_remote']}, this nosync knows up to {REMOTE_FORMAT}: upgrade"
        )
    with parsed("which store a remote is of", f"{bucket.url}/{STORE}"):
        marker = Marker(str(fields["store_id"]), int(fields["key_groups"]))
        check_key_groups(marker.key_groups)
    return marker


def claim_store(bucket: Bucket, marker: Marker) -> None:
    """Makes a prefix one of this store. Raises RemoteTakenError where it is another store's."""
    fields = {"nosync_remote": REMOTE_FORMAT, "store_id": marker.store_id, "key_groups": marker.key_groups}
    if bucket.put_new(STORE, canonical(fields).encode()):
        return
    found = read_store(bucket)
    if found != marker:
        raise RemoteTakenError(
            f"{bucket.url} has copies of store {found.store_id} ({found.key_groups} key groups), and this is store "
            f"{marker.store_id} ({marker.key_groups} key groups): give each store a prefix of its own"
        )


def check_there(bucket: Bucket, names: NodeNames, marker: Marker) -> None:
    """Raises GoneError where a prefix has nothing of what it had of this node. Where its claims are there, of this store, and
    only the object is gone that says so of the prefix, that may be put again.
    """
    try:
        bucket.get(STORE)
    except MissingObjectError:
        claim = newest_claim(bucket, names)
        if claim is None or claim.store_id != marker.store_id:
            raise gone(bucket.url) from None


def newest_claim(bucket: Bucket, names: NodeNames) -> Claim | None:
    """Returns the greatest claim of a node. What a listing does not show yet is found by its number."""
    numbers = [number for one in bucket.list(names.claims) if (number := claim_of(one.name)) is not None]
    last = max(numbers, default=0)
    found = _whole_claim(bucket, names, last)
    while (later := _claim(bucket, names, last + 1, found)) is not None:
        found, last = later, last + 1
    return found


def _whole_claim(bucket: Bucket, names: NodeNames, number: int) -> Claim | None:
    """Returns a claim. One that is damaged is counted as the claim before it once more: its number is taken."""
    whole = number
    while whole and (found := _claim(bucket, names, whole)) is not None and found.is_damaged:
        whole -= 1
    known = _claim(bucket, names, whole) if whole else None
    return known if whole == number else _claim(bucket, names, number, known)


def check_may_claim(bucket: Bucket, names: NodeNames, marker: Marker, incarnation: str, host: str) -> None:
    """Raises RemoteTakenError where this incarnation had the log of a node, and another took it over."""
    newest = newest_claim(bucket, names)
    if newest is not None and newest.incarnation != incarnation and incarnation in newest.earlier:
        raise taken(bucket.url, names.node, Claim(0, marker.store_id, incarnation, "", host), newest)


def take_claim(bucket: Bucket, names: NodeNames, marker: Marker, incarnation: str, token: str, host: str) -> Claim:
    """Puts the next claim of a node, and returns it. Whoever had the log before notices, and stops.

    Raises RemoteTakenError where this incarnation had one and another took it over.
    """
    for _ in range(_ATTEMPTS):
        newest = newest_claim(bucket, names)
        number = max(newest.number if newest else 0, _greatest_used(bucket, names)) + 1
        earlier = newest.earlier if newest else ()
        if newest is not None and newest.incarnation != incarnation:
            earlier = (*earlier, newest.incarnation)
        mine = Claim(number, marker.store_id, incarnation, token, host, earlier)
        if newest is not None and incarnation in earlier:
            raise taken(bucket.url, names.node, mine, newest)
        if (
            bucket.put_new(names.claim(number), canonical(_said(mine)).encode())
            or _claim(bucket, names, number) == mine
        ):
            return mine
    raise RemoteError(
        f"{bucket.url}: other writers take the log of node {names.node} all the time; is it used by several?"
    )


def _greatest_used(bucket: Bucket, names: NodeNames) -> int:
    """Returns the greatest claim under which something was put, should the claims themselves be gone; 0: none was."""
    listed = (position_of(one.name) for prefix in (names.indexes, names.packs) for one in bucket.list(prefix))
    return max((at.claim for at in listed if at is not None), default=0)


def _said(claim: Claim) -> dict[str, Any]:
    fields = asdict(claim)
    del fields["is_damaged"]
    return fields


def check_claim(bucket: Bucket, names: NodeNames, mine: Claim) -> None:
    """Raises RemoteTakenError where there is a greater claim than this one, GoneError where this one is gone."""
    newer = _claim(bucket, names, mine.number + 1)
    if newer is not None:
        raise taken(bucket.url, names.node, mine, newer)
    found = _claim(bucket, names, mine.number)
    if found is None or (found != mine and not found.is_damaged):
        raise gone(bucket.url)


def gone(url: str) -> GoneError:
    """Returns the error of a place that had copies of this directory and has them no more."""
    return GoneError(
        f"{url}: the copies that this directory put there are gone. If it is a directory that is not mounted, mount it: copies "
        "go on then. If somebody emptied the prefix, give another one: until then nothing more counts as copied"
    )


def taken(url: str, node: str, mine: Claim, newer: Claim) -> RemoteTakenError:
    """Returns the error of a writer whose log was taken over. Both are named."""
    error = RemoteTakenError(
        f"{url}: the log of node {node} was taken over by {newer.who()}, and this is {mine.who()}: two directories claim to "
        "be the same node. Stop the wrong one. If this one is right, give it another prefix, or remove the other's copies"
    )
    error.by_this_directory = newer.is_damaged or mine.incarnation == newer.incarnation
    return error


def _claim(bucket: Bucket, names: NodeNames, number: int, before: Claim | None = None) -> Claim | None:
    """Returns a claim; None where there is none. `before`: the one that a damaged one is taken for."""
    name = names.claim(number)
    try:
        text = bucket.get(name)
    except MissingObjectError:
        return None
    try:
        with parsed("a claim", f"{bucket.url}/{name}"):
            fields = json.loads(text)
            return Claim(**{**fields, "earlier": tuple(fields["earlier"])})
    except CorruptionError as error:  # of a host that lost power, say: whoever comes next takes the next number
        log.warning("passed over: %s", error)
        known = before or Claim(number, "", "", "", "")
        return replace(known, number=number, token="", is_damaged=True)


def _fields(text: bytes, where: str) -> dict[str, Any]:
    try:
        with parsed("which store a remote is of", where):
            fields = json.loads(text)
            if not isinstance(fields, dict) or not isinstance(fields["nosync_remote"], int):
                raise TypeError("it has no format")
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}; all else there may be whole: delete this object alone, and it is put again when a store that copies "
            "there is opened, by its daemon, or by nosync backup DIR URL"
        ) from None
    return fields
