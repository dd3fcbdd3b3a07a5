"""Stubs whose objects are gone: a writer that goes on in the bucket merged what they held, and collected it.

What it put instead stands for them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from nosync.lsm.errors import CorruptionError
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import TraceId
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.env import Env, storage_errors
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.listed import ListedLayers
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.stubs import read_stub, stub_names, stub_path, write_stub
from nosync.replication.remote.view import RemoteView, read_view

log = logging.getLogger("nosync.remote")


def renew_stubs(root: Path, bucket: Bucket, env: Env) -> None:
    """Brings the stubs of a directory in line with what a bucket holds now. Durable when this returns.

    Raises RemoteError where the bucket does not answer.
    """
    view, names = read_view(bucket), list(stub_names(root))
    listed = ListedLayers(Timelines(root, env))
    listed.choose(view)
    for name in [name for name in names if name in view.files and listed.is_another(view.files[name])]:
        del view.files[name]  # a node put it that did not seal the epoch
    ends: dict[TraceId, Time] = {}
    for layer in (name.layer for name in names if name.layer is not None):
        ends[layer.trace] = max(layer.description.upper, ends.get(layer.trace, layer.description.upper))
    for name in names:
        held = view.files.get(name)
        if held is None:
            _replace(root, name, view, env, ends)
            continue
        try:
            is_other = read_stub(root, name, env) not in (held, None)  # None: it went meanwhile
        except CorruptionError as error:
            log.warning("written anew: %s", error)
            is_other = True
        if is_other:
            _write(root, held, env)


def _write(root: Path, placed: Placed, env: Env) -> None:
    path = write_stub(root, placed, env)
    with storage_errors("sync", path):
        env.sync_file(path)
        env.sync_dir(path.parent)


def _replace(root: Path, gone: FileName, view: RemoteView, env: Env, ends: Mapping[TraceId, Time]) -> None:
    """Puts stubs of what covers a layer in its place. Where nothing does it stays, and who needs it is told: an object
    that is away, or a log that cannot be read to its end, is no reason to forget where bytes are. `ends`: of each trace
    where what is here ends. What a layer has of later epochs is not seen: a restored directory goes on with timelines,
    and layers, of its own. So it may be there, but what it was merged up to must not be later.
    """
    others = [name for name in view.files if _stands_for(name, gone, ends)]
    if not others or env.exists(root / gone):
        return
    for name in others:
        if not env.exists(root / name):
            _write(root, view.files[name], env)
    path = stub_path(root, gone)
    with storage_errors("remove", path):
        env.unlink(path)


def _stands_for(name: FileName, gone: FileName, ends: Mapping[TraceId, Time]) -> bool:
    one, other = name.layer, gone.layer
    if one is None or other is None or one.trace != other.trace or one.description.since >= ends[one.trace]:
        return False
    return one.description.covers(other.description)
