"""Checkpoints of Structured Streaming queries that nobody rewrote: kept as a history of files, and gone on from anywhere.

A Structured Streaming checkpoint is a log of immutable files. This package keeps every file that Spark finished, says
from names and a few small files what a query needs to go on after a batch, and makes directories that a query starts
from. It may import nosync.lsm; jobs, operators and the flow know nothing of it.
"""

from nosync.checkpoints.api import Checkpoint, CheckpointStatus, Watch, checkpoint, watch
from nosync.checkpoints.door.api import Door, serve

__all__ = ["Checkpoint", "CheckpointStatus", "Door", "Watch", "checkpoint", "serve", "watch"]
