"""Small JSON files that carry their own digest, are published whole or not at all, and never change.

    {"blake3": digest of body, "body": {...}, "nosync": 1}

A file with an attachment goes on after that line: `body.rest_blake3` is the digest of all that follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.platform.env import Env, Identity, is_foreign, storage_error, storage_errors
from nosync.lsm.platform.file_pool import new_file
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.publish import discard, give_name, temporary_path

_REST = "rest_blake3"
_ATTEMPTS = 3


def canonical(fields: Mapping[str, Any]) -> str:
    """Returns one text for equal values, whoever writes it."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def seal_json(fields: Mapping[str, Any], rest: bytes = b"") -> bytes:
    """Returns the bytes of such a file. `rest`: its attachment."""
    body = {**fields, _REST: blake3(rest).hexdigest()} if rest else fields
    outer = {"nosync": 1, "blake3": blake3(canonical(body).encode()).hexdigest(), "body": body}
    head = json.dumps(outer, sort_keys=True).encode()
    return head + b"\n" + rest if rest else head


def unseal_json(text: bytes, where: str) -> tuple[dict[str, Any], bytes]:
    """Returns the fields and the attachment. Raises CorruptionError where either is not what was written."""
    head, _, rest = text.partition(b"\n")
    with parsed("a whole file; it is torn", where):
        outer = json.loads(head)
        body: dict[str, Any] = outer["body"]
        expected, format_ = outer["blake3"], outer["nosync"]
        if not isinstance(body, dict):
            raise TypeError("it has no fields")
    if format_ != 1:
        raise CorruptionError(
            f"{where}: is of format {format_}, expected 1: bits were flipped, or a newer nosync wrote it"
        )
    attached = body.get(_REST, blake3(b"").hexdigest())
    with parsed("a whole file; it is torn", where):
        found = blake3(canonical(body).encode()).hexdigest()
    if found != expected or blake3(rest).hexdigest() != attached:
        raise CorruptionError(f"{where}: does not match its digest; bits were flipped")
    return body, rest


def whole_number(value: object, what: str) -> int:
    """Returns a count or a time, as JSON has it. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} is {value!r}, expected a number >= 0")
    return value


def publish_text(root: Path, final: Path, text: bytes, env: Env, *, synced: bool = False) -> Identity | None:
    """Publishes a file, whole or not at all. None where the name is taken. Not durable until it and its directory are synced.

    `synced`: its contents are, before it has the name, so that no power cut leaves a name without them.
    """
    for attempt in range(_ATTEMPTS):
        temporary = temporary_path(root, env)
        with storage_errors("write", final):
            try:
                with new_file(root, temporary, env) as file:
                    file.write(text)
                if synced:
                    env.sync_file(temporary)
                try:
                    return give_name(temporary, final, env)
                except FileExistsError:
                    return None
            except FileNotFoundError:  # a node that starts just now empties tmp/, also of what is being written
                if attempt + 1 == _ATTEMPTS:
                    raise
            finally:
                discard(temporary, env)
    raise AssertionError("the last attempt returns or raises")


def publish_small(root: Path, final: Path, fields: Mapping[str, Any], env: Env) -> bool:
    """Publishes a small JSON file with its digest, whole or not at all, also after a power cut. False where the name is taken."""
    return publish_text(root, final, seal_json(fields), env, synced=True) is not None


def replace_small(root: Path, final: Path, fields: Mapping[str, Any], env: Env) -> None:
    """Writes such a file in place of the one that is there. Durable when this returns; until then the one before counts."""
    temporary = temporary_path(root, env)
    with storage_errors("write", final):
        try:
            with new_file(root, temporary, env) as file:
                file.write(seal_json(fields))
            env.sync_file(temporary)
            env.replace(temporary, final)
        finally:
            discard(temporary, env)
        env.sync_dir(final.parent)


def read_small(path: Path, env: Env) -> dict[str, Any]:
    """Returns what `publish_small` wrote. Raises CorruptionError where it is damaged, its attachment included."""
    try:
        text = read_if_there(path, env)
    except FileNotFoundError as error:
        raise storage_error("read", path, error) from error
    return unseal_json(text, str(path))[0]


def read_if_there(path: Path, env: Env) -> bytes:
    """Reads a file that others may remove. Raises FileNotFoundError where they did, StorageError where it cannot be
    read, and CorruptionError where it is a link, a FIFO or anything else that a store does not write.
    """
    try:
        return env.read(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_foreign(error):
            raise CorruptionError(f"{path}: {error.strerror}; nosync did not write it") from error
        raise storage_error("read", path, error) from error


def sync_published(root: Path, path: Path, env: Env) -> None:
    """Makes a small file durable that was just published. Where that fails it is withdrawn, and the error raised."""
    try:
        with storage_errors("sync", path):
            env.sync_file(path)
            for directory in path.parents:
                env.sync_dir(directory)
                if directory == root:
                    break
    except StorageError:
        with storage_errors("withdraw", path):
            env.unlink(path)
            env.sync_dir(path.parent)  # or a power cut brings it back
        raise
