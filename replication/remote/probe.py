"""Looks whether an object store keeps what copies in it rely on: conditional writes, and the permissions for all calls."""

from __future__ import annotations

from nosync.lsm.errors import RemoteError
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.names import PROBE

_FIRST, _SECOND = b"first", b"second"


def probe(bucket: Bucket, token: str) -> None:
    """Writes, lists, reads and deletes an object of this name. Raises RemoteError where that cannot be, or where a
    second writer of the name is not told that there is one.
    """
    name = f"{PROBE}/{token}"
    if not bucket.put_new(name, _FIRST):
        raise RemoteError(f"{bucket.url}: {name} is there, and its name is random: the store answers what is not so")
    try:
        is_second = bucket.put_new(name, _SECOND)
        found = bucket.get(name)
        bucket.list(f"{PROBE}/")
    finally:
        bucket.delete([name])
    if is_second or found != _FIRST:
        raise RemoteError(
            f"{bucket.url}: this object store ignores conditional writes (If-None-Match: *): an object that was there was "
            "written over. Two writers could then destroy each other's copies, so it is not used; give one that keeps them, "
            "such as S3, Google Cloud Storage, Azure, MinIO or SeaweedFS"
        )
