"""Stubs whose objects are gone: a writer that goes on in the bucket merged what they held, and collected it.

What it put instead stands for them. Where nothing does the stub goes, and the layer is lost as any other file would be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from nosync.lsm.platform.env import Env, storage_errors
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.stubs import read_stub, stub_names, stub_path, write_stub
from nosync.replication.remote.view import RemoteView, read_view

log = logging.getLogger("nosync.remote")


def renew_stubs(root: Path, bucket: Bucket, env: Env, damaged: Iterable[FileName] = ()) -> None:
    """Brings the stubs of a directory in line with what a bucket holds now. `damaged`: those that cannot be read.

    Raises RemoteError where the bucket does not answer.
    """
    view, unread = read_view(bucket), set(damaged)
    for name in list(stub_names(root)):
        held = view.files.get(name)
        if held is None:
            _replace(root, name, view, env)
        elif name in unread or read_stub(root, name, env) != held:
            write_stub(root, held, env)


def _replace(root: Path, gone: FileName, view: RemoteView, env: Env) -> None:
    """Puts stubs of what covers a layer in its place."""
    others = [name for name in view.files if _stands_for(name, gone)]
    for name in others:
        if not env.exists(root / name):
            write_stub(root, view.files[name], env)
    if not others and not env.exists(root / gone):
        log.warning("lost: %s is in no object any more; recover() recomputes it", gone)
    path = stub_path(root, gone)
    with storage_errors("remove", path):
        env.unlink(path)


def _stands_for(name: FileName, gone: FileName) -> bool:
    one, other = name.layer, gone.layer
    return (
        one is not None and other is not None and one.trace == other.trace and one.description.covers(other.description)
    )
