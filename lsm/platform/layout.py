"""Every name on disk, on one page. What is in the files: docs/format.md.

NOSYNC                                          what this is: format, store id, key groups
LOCK                                            held by the node of this directory
VERIFIED                                        on which host all of this was looked at
layers/<stage>/<fingerprint>/<shard>/<lower>-<upper>-<since>.layer
manifests/<timeline>/<epoch>.json               or, of many old epochs, <first>-<last>.json
branches/<n>.json                               the log of what branches there are
jobs/<timeline>/<n>-<token>.json                instances of a job; the newest one may write
pins/<name>-<token>.json
sinks/<stage>/<timeline>/<epoch>-<token>.json   what was delivered
times/<timeline>/<epoch>-<token>.json           when it was sealed; of several epochs <first>-<last>-<token>.json
quarantine/                                     what was torn or flipped, kept for inspection
tmp/                                            being written; emptied at the node's start
ready/                                          empty files that the node made ahead, to be written
catalog/                                        RocksDB, the node's rebuildable index
given-up.json, let-go.json                      what an operator discarded here; up to where inputs were released
stubs.json                                      in a directory restored with --lazy: where the bytes of some layers still are
stubs/<stage>/<fingerprint>/<shard>/...         for each of those layers a small file under its name
remote.json                                     how far the copies in object stores are, for who only reads
copied-to.json                                  the object stores that have had copies of this directory
place.json                                      in a directory that a daemon keeps: a token of it
being-filled.json                               in one that peers fill, until all that they have was here once
checkpoints/<name>/                             a kept checkpoint of a Structured Streaming query, under Spark's names
checkpoints/<name>.<n>/                         the same after its n-th rewind; `rewound.json` in it says from where
checkpoints/<name>/pins/<pin>-<token>.json
checkpoints/<name>/settings/<what>-<token>.json
checkpoint-views/<name>/<batch>/                the checkpoint as of a batch, made of hard links for who reads it
checkpoint-live/<name>/                         the checkpoint of a query that writes through the door, as Spark sees it
checkpoint-live/<name>/.door/                   what the door has to know of it, which the query does not see
checkpoint-live/.writing/<token>                being written; emptied when the door opens
checkpoint-live/.spool/<name>/<token>           what tasks of this host wrote for the door of another host
checkpoint-live/.address, checkpoint-secret     where the door listens; what its callers have to know
"""

from __future__ import annotations

MARKER, LOCK, VERIFIED, CATALOG = "NOSYNC", "LOCK", "VERIFIED", "catalog"
LAYERS, MANIFESTS, BRANCHES, QUARANTINE = "layers", "manifests", "branches", "quarantine"
JOBS, PINS, SINKS, TIMES = "jobs", "pins", "sinks", "times"
REGISTERS = (JOBS, PINS, SINKS, TIMES)
"""Each holds small facts, which any node may add or take back."""
TEMPORARY_DIRECTORY = "tmp"
READY, MADE, MAKING = "ready", "made", "making"
"""Files made ahead; in that directory those that can be taken, and those that are being made."""
DISCARDED, RELEASED = "given-up.json", "let-go.json"
"""The contents that an operator discarded here; and the main timeline's safe point when inputs were last released,
which the catalog has too, and may lose.
"""
PLACE_FILE, BEING_FILLED = "place.json", "being-filled.json"
REMOTE_STATUS, COPIED_TO = "remote.json", "copied-to.json"
RESTORING = "restoring.json"
"""What an interrupted restore from copies leaves, which can be said again: from where, and of what."""
STUBS, STUBS_FROM = "stubs", "stubs.json"
"""Of a store that is restored lazily: the directory of what stands for layers, and which object store has their bytes."""
CHECKPOINTS, CHECKPOINT_VIEWS, CHECKPOINT_LIVE = "checkpoints", "checkpoint-views", "checkpoint-live"
CHECKPOINT_SECRET = "checkpoint-secret"
DOOR_ADDRESS = ".address"
"""In `checkpoint-live/`."""
OWN_DIRECTORIES = (
    LAYERS, MANIFESTS, PINS, QUARANTINE, CATALOG, TEMPORARY_DIRECTORY, BRANCHES, JOBS, SINKS, TIMES, READY, f"{READY}/{MADE}",
    f"{READY}/{MAKING}", STUBS,
)  # fmt: skip
