"""Object stores by obstore: S3, Google Cloud Storage, Azure, a directory, and the memory of this process."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from nosync.lsm.errors import CorruptionError, InvalidInputError, NosyncError, RemoteError
from nosync.replication.remote.bucket import Bucket, MissingObjectError, ObjectInfo, UnavailableError
from nosync.replication.remote.cloud_errors import DELETE, GET, LIST, PUT, mapped, scrubbed
from nosync.replication.remote.url import MEMORY, RemoteUrl, parse_url

CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 5.0, 120.0
SILENCE_S = 10.0
"""Who reads waits so long for the next bytes. While a file is put, none come."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_MOST_LISTED = 1000
_TOKEN_BITS = 64
_AZURE = "az"
_in_memory: dict[str, Any] = {}


def open_bucket(url: str, *, to_read: bool = False) -> Bucket:
    """Returns the objects below a URL. Nothing is asked of the store yet. `to_read`: a directory is not made.

    Raises InvalidInputError for a URL that is none, RemoteError where the extra is not installed, or where the
    environment lacks what the scheme needs.
    """
    found = parse_url(url)
    try:
        import obstore  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise RemoteError(f"{found}: needs the extra: pip install 'nosync[remote]' ({error})") from None
    if to_read and found.scheme == "file" and not Path("/", found.path).is_dir():
        raise RemoteError(f"{found}: there is no such directory")
    return CloudBucket(found, to_read=to_read)


class CloudBucket:
    """See Bucket. Calls are made once: whoever calls knows what may be said twice."""

    def __init__(self, url: RemoteUrl, *, to_read: bool = False) -> None:
        self.url, self._scheme, self._to_read = str(url), url.scheme, to_read
        self._directory = Path("/", url.path) if url.scheme == "file" else None
        with self._mapped("open", ""):
            self._store = self._opened(url)
            self._place = None if self._directory is None else _place_of(self._directory)

    def _opened(self, url: RemoteUrl) -> Any:
        from obstore.store import LocalStore, MemoryStore, from_url  # noqa: PLC0415

        if url.scheme == MEMORY:
            return _in_memory.setdefault(str(url), MemoryStore())
        if self._directory is not None:
            return LocalStore(prefix=self._directory, mkdir=True)
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        options: Any = {
            "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        }
        if self._to_read:
            options["read_timeout"] = timedelta(seconds=SILENCE_S)
        if url.scheme == "s3" and endpoint.startswith("http://"):  # as whoever set it wants it
            options["allow_http"] = True
        provider = _profile() if url.scheme == "s3" else None
        more: Any = {} if provider is None else {"credential_provider": provider}
        return from_url(str(url), client_options=options, retry_config={"max_retries": 0}, **more)

    @contextmanager
    def _mapped(self, doing: str, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError  # noqa: PLC0415

        try:
            yield
        except NosyncError:
            raise
        except (BaseError, OSError, NotImplementedError, ValueError) as error:
            raise mapped(error, self._scheme, self.url, doing, name) from None

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        """See Bucket."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        with self._mapped(PUT, name):
            if self._directory is not None:
                self._check_mounted()
                is_new = _put_durably(self._directory, name, data)
                self._check_mounted()
                return is_new
            try:
                obstore.put(self._store, name, memoryview(data), mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def _check_mounted(self) -> None:
        """Raises UnavailableError where the directory is another one than it was: its file system was unmounted, say."""
        assert self._directory is not None, "it is a directory"
        found = _place_of(self._directory)
        if found != self._place:
            self._place = (
                found or self._place
            )  # if it is asked again, whose claim it has says whether it is the right one
            raise UnavailableError(
                f"{self.url}: {'it is not there any more' if found is None else 'it is another directory than it was'}; if its "
                "file system is not mounted, mount it: copies go on then"
            )

    def get(self, name: str) -> bytes:
        """See Bucket."""
        import obstore  # noqa: PLC0415

        with self._mapped(GET, name):
            return obstore.get(self._store, name).bytes().to_bytes()

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """See Bucket."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import BaseError  # noqa: PLC0415

        if begin == end:
            return b""
        found = b""
        with self._mapped(GET, name):
            try:
                found = obstore.get_range(self._store, name, start=begin, end=end).to_bytes()
            except BaseError:
                if obstore.head(self._store, name)["size"] >= end:
                    raise
        if len(found) != end - begin:
            raise CorruptionError(
                f"{self.url}: {name} has no bytes {begin} to {end}: it is not the object that was written"
            )
        return found

    def get_end(self, name: str, size_bytes: int) -> bytes:
        """See Bucket."""
        import obstore  # noqa: PLC0415
        from obstore.exceptions import BaseError  # noqa: PLC0415

        with self._mapped(GET, name):
            if self._scheme != _AZURE:
                try:
                    return obstore.get(self._store, name, options={"range": {"suffix": size_bytes}}).bytes().to_bytes()
                except BaseError:  # nothing has an end of so many bytes where there are none
                    if obstore.head(self._store, name)["size"]:
                        raise
                    return b""
            end = obstore.head(self._store, name)["size"]  # Azure knows no ranges that count from the end
        return self.get_range(name, max(0, end - size_bytes), end)

    def directories(self, prefix: str) -> list[str]:
        """See Bucket."""
        import obstore  # noqa: PLC0415

        with self._mapped(LIST, prefix):
            found = obstore.list_with_delimiter(self._store, prefix.rstrip("/"))["common_prefixes"]
        return sorted(one.rstrip("/").rpartition("/")[2] for one in found)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See Bucket."""
        import obstore  # noqa: PLC0415

        found: list[ObjectInfo] = []
        with self._mapped(LIST, prefix):
            for some in obstore.list(self._store, prefix, chunk_size=_MOST_LISTED):
                found += [ObjectInfo(one["path"], one["size"]) for one in some]
        return sorted(found)

    def delete(self, names: Sequence[str]) -> None:
        """See Bucket."""
        import obstore  # noqa: PLC0415

        if not names:
            return
        try:
            with self._mapped(DELETE, names[0]):
                obstore.delete(self._store, list(names))
        except MissingObjectError:  # a directory says so of the first one that is not there
            for name in names if len(names) > 1 else ():
                self.delete([name])


def _put_durably(directory: Path, name: str, data: bytes | bytearray | memoryview) -> bool:
    """Puts an object into a directory, unless it is there; it gets its name when its bytes are durable, so that no crash
    leaves half of it. (obstore syncs neither.)
    """
    path = directory / name
    if path.exists():
        _sync_found(directory, path)
        return False
    for parent in reversed([one for one in path.parents if directory in one.parents]):
        parent.mkdir(exist_ok=True)  # not the directory itself: it may not be mounted
    # Names that end so are passed over by listings, as those that obstore itself writes under.
    temporary = path.with_name(f"{path.name}#{secrets.randbits(_TOKEN_BITS)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _link(temporary, path)
    except FileExistsError:
        _sync_found(directory, path)
        return False
    finally:
        temporary.unlink(missing_ok=True)
    _sync_parents(directory, path)
    return True


def _place_of(directory: Path) -> tuple[int, int] | None:
    """Returns what tells a directory from others that come to have its name; None: there is none."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _link(source: Path, target: Path) -> None:
    """Raises RemoteError on a file system that has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise RemoteError(
            f"file://{target.parent}: this file system has no hard links ({error.strerror}), by which an object gets its name "
            "whole or not at all: give a directory of another one, or an object store"
        ) from None


def _sync_found(directory: Path, path: Path) -> None:
    """Makes an object durable that is there: who put it may not have got so far, and puts it again now."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    _sync_parents(directory, path)


def _sync_parents(directory: Path, path: Path) -> None:
    for parent in path.parents:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that syncs no directories
                raise
        finally:
            os.close(fd)
        if parent == directory:
            break


def _profile() -> Any:
    """Returns who gives the credentials of a profile in AWS's own files; None where the environment has none."""
    if not os.environ.get("AWS_PROFILE") or os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    try:
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]  # noqa: PLC0415
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError:
        raise InvalidInputError(
            "AWS_PROFILE is set, and its files are read by boto3, which is not installed: pip install boto3, or give "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    try:
        return Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:
        raise InvalidInputError(
            f"AWS_PROFILE is {os.environ['AWS_PROFILE']!r}, and gives no credentials: {scrubbed(str(error))}"
        ) from None
