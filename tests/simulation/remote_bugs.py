"""Bugs planted into the copies in an object store, each of which the simulation must find."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from unittest import mock

from nosync.replication.remote import log, reach, uploader
from nosync.replication.remote.garbage import Collector
from nosync.replication.remote.log import LogWriter
from nosync.replication.remote.node_listing import NodeListing
from nosync.replication.remote.pack import PackBuilder, Step


@contextmanager
def acknowledged_before_the_answer() -> Iterator[None]:
    """A pack counts as soon as it is sent."""
    write = LogWriter.write

    def written(self: LogWriter, builder: PackBuilder, step: Step) -> None:
        self.acknowledged = step.reached
        write(self, builder, step)

    with mock.patch.object(LogWriter, "write", written):
        yield


@contextmanager
def taken_for_success_with_other_bytes() -> Iterator[None]:
    """What is there under the name counts, whatever it is."""
    with mock.patch.object(LogWriter, "_check_same", return_value=None):
        yield


@contextmanager
def fence_ignored() -> Iterator[None]:
    """A writer does not look whether its log was taken over."""
    with mock.patch.object(log, "check_claim", return_value=None):
        yield


@contextmanager
def collected_without_a_grace() -> Iterator[None]:
    """What is not needed goes at once."""
    collect = Collector.collect

    def collected(
        self: Collector, writer: LogWriter, listing: NodeListing, going: Collection[str], now_s: float
    ) -> None:
        self._grace_s = 0.0
        collect(self, writer, listing, going, now_s)

    with mock.patch.object(Collector, "collect", collected):
        yield


@contextmanager
def packs_collected_before_an_index() -> Iterator[None]:
    """What is older than the newest pack goes, though readers follow the log from the newest index."""
    with mock.patch.object(Collector, "_followed_since", lambda _, indexes, writer: writer.contents.at):
        yield


@contextmanager
def dropped_before_what_stands_for_it() -> Iterator[None]:
    """What is not here any more is dropped, whether or not the bucket has what stands for it."""

    def not_needed(
        held: object, layers: dict[str, object], small: set[str], timelines: object, released: object, exact: object
    ) -> list[str]:
        return [str(v.name) for v in held if v.name.layer is not None and str(v.name) not in layers]  # type: ignore[attr-defined]

    with mock.patch.object(uploader, "not_needed", not_needed):
        yield


@contextmanager
def manifests_not_asked_for() -> Iterator[None]:
    """An epoch is safe when its layers are there, though its manifest is not."""
    with mock.patch.object(reach, "_has_file", return_value=True):
        yield


BUGS = (
    acknowledged_before_the_answer,
    taken_for_success_with_other_bytes,
    fence_ignored,
    collected_without_a_grace,
    packs_collected_before_an_index,
    dropped_before_what_stands_for_it,
    manifests_not_asked_for,
)
