"""The remote level of one node: its copies in an object store, made in a thread of their own.

Invariants
- Nobody waits for this thread but who asks it to `push`, and who closes the store: as long as they say, and for the one
  request that is going on then.
- What the store refuses for good (a permission, another writer) ends the copies and is shown; what may pass is tried
  again, less and less often. The thread never ends by an error.
"""

from __future__ import annotations

import logging
import platform
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from nosync.lsm.errors import NosyncError, RemoteError, described
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.node.node import Node
from nosync.lsm.node.remote_status import copied_to, note_copied_to, write_remote_status
from nosync.lsm.status import RemoteStatus
from nosync.replication.remote.bucket import Bucket, UnavailableError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.fence import GoneError, RemoteTakenError, check_may_claim, check_there, claim_store
from nosync.replication.remote.garbage import Collector
from nosync.replication.remote.history import OtherHistoryError, begin_log
from nosync.replication.remote.names import EMBEDDED, NodeNames
from nosync.replication.remote.node_listing import NodeListing
from nosync.replication.remote.others import OtherNodes, furthest
from nosync.replication.remote.pack import Reached
from nosync.replication.remote.presence import mend
from nosync.replication.remote.probe import probe
from nosync.replication.remote.reach import remotely_safe
from nosync.replication.remote.settings import RemoteSettings
from nosync.replication.remote.source import NodeSource
from nosync.replication.remote.uploader import Uploader
from nosync.replication.remote.url import check_outside

log = logging.getLogger("nosync.remote")

_TICK_S, _LEAST_TICK_S = 1.0, 0.05
_TICKS_PER_FLUSH = 4
_LOOK_AT_ALL_S = 60.0
_LOOK_AT_MOST_S = 10.0
"""How long whoever opens a store waits for an object store that does not answer."""
_TOOK = re.compile(r"[\d.]+\s?(?:[nµμm]?s)\b")
"""How errors of clients say how long a call took."""
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_SHOW_EVERY_S = 10.0
_COLLECTIONS_PER_GRACE, _COLLECT_AT_MOST_S, _PACKS_TO_COLLECT = 4, 900.0, 16


class RemoteLevel:
    """See nosync.lsm.node.api.RemoteCopies."""

    def __init__(
        self, node: Node, settings: RemoteSettings, *, name: str = EMBEDDED, bucket: Bucket | None = None
    ) -> None:
        """`name`: that of the node in the bucket. Raises InvalidInputError, RemoteError where the extra is missing."""
        self.settings, self._node, self._env = settings, node, node.directory.env
        self._bucket = bucket or open_bucket(settings.url)
        check_outside(self._bucket.url, node.directory.root)
        self._names = NodeNames(name)
        self._source = NodeSource(node)
        store_id = self._source.marker.store_id
        self._others = None if name == EMBEDDED else OtherNodes(self._bucket, name, store_id)
        self._had_copies = self._bucket.url in copied_to(node.directory.root, self._env)
        self._is_checked = False
        self._uploader: Uploader | None = None
        self._acknowledged = Reached()
        self._step_lock = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._flushed_s = self._env.monotonic_s()
        self._collector = Collector(self._bucket, self._names, settings.grace_s, self._env)
        self._look_s = self._retry_s = self._collect_s = float("-inf")
        self._pause_s = _FIRST_RETRY_S
        self._is_ended, self._problem, self._not_collected = False, "", ""
        self._sealed: deque[tuple[int, float]] = deque()  # epochs that are not remotely safe, when they were first seen
        self._shown: RemoteStatus | None = None
        self._shown_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="nosync-remote", daemon=True)

    def start(self) -> None:
        """Looks whether copies can be kept there, and begins. Raises RemoteError where they are refused; a store that
        cannot be reached now is tried again in the background.
        """
        self._begin_by(self._check_soon)
        self._thread.start()

    def begin_without_thread(self) -> None:
        """Begins as `start` does; each step is then taken by the caller, with `step_now`."""
        self._begin_by(self._check_place)

    def _begin_by(self, check: Callable[[], None]) -> None:
        try:
            check()
        except (UnavailableError, GoneError) as error:
            self._failed(error)
        except BaseException:
            self._source.close()
            raise
        self._node.remotes.attach(self)

    def step_now(self) -> None:
        """Takes one step of the thread, also where it would pause after an error."""
        self._retry_s = float("-inf")
        if not self._is_ended:
            self._step()

    def next_pack(self) -> str | None:
        """Returns the name of the pack that comes next; None where that is not known yet."""
        return None if self._uploader is None else self._uploader.writer.next_pack()

    def _check_soon(self) -> None:
        """Looks whether copies can be kept there. Raises UnavailableError where the store says nothing for a while."""
        found: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def look() -> None:
            try:
                self._check_place()
                found.put(None)
            except BaseException as error:  # noqa: BLE001 - it is raised by who waits, if somebody does
                found.put(error)

        threading.Thread(target=look, name="nosync-remote-look", daemon=True).start()
        try:
            error = found.get(timeout=_LOOK_AT_MOST_S)
        except queue.Empty:
            raise UnavailableError(
                f"{self._bucket.url}: it said nothing for {_LOOK_AT_MOST_S:g} seconds; it is tried again"
            ) from None
        if error is not None:
            raise error

    def _check_place(self) -> None:
        """Looks whether copies can be kept there, by few requests, and makes the place this store's."""
        probe(self._bucket, self._env.token())
        source = self._source
        if self._had_copies:
            check_there(self._bucket, self._names, source.marker)
        claim_store(self._bucket, source.marker)
        check_may_claim(self._bucket, self._names, source.marker, source.incarnation, platform.node())
        self._is_checked = True

    def _begin(self) -> Uploader:
        """Takes the log, and goes on from what earlier writers left."""
        if not self._is_checked:
            self._check_place()
        writer = begin_log(self._bucket, self._names, self._source, self._env.token(), platform.node())
        return Uploader(self._source, writer, self.settings, self._others)

    # --- the thread ---------------------------------------------------------------------------------------------------

    @property
    def _tick_s(self) -> float:
        return min(_TICK_S, max(_LEAST_TICK_S, self.settings.flush_s / _TICKS_PER_FLUSH))

    def _run(self) -> None:
        while not self._closing.is_set() and not self._is_ended:
            self._wake.wait(self._tick_s)
            self._wake.clear()
            if not self._closing.is_set():
                with self._step_lock:
                    self._step()

    def _step(self, *, at_once: bool = False, until_s: float = float("inf")) -> None:
        """Gathers what is new, and puts it where that is due; no pack is begun after `until_s`. Never raises."""
        now_s = self._env.monotonic_s()
        try:
            self._note_sealed(now_s)
            if now_s >= self._retry_s or at_once:
                self._work(now_s, at_once=at_once, until_s=until_s)
                self._problem, self._pause_s = self._damage(), _FIRST_RETRY_S
        except Exception as error:  # noqa: BLE001 - it is logged; without this thread nothing more would be copied
            self._failed(error)
        self._show(now_s)

    def _work(self, now_s: float, *, at_once: bool, until_s: float) -> None:
        if self._uploader is None:
            self._uploader = self._begin()
        uploader = self._uploader
        if now_s >= self._look_s or at_once:
            uploader.look_at_all()
            self._look_s = now_s + _LOOK_AT_ALL_S
        uploader.gather()
        look_s = self.settings.flush_s if self._sealed else max(self.settings.flush_s, _LOOK_AT_ALL_S)
        if self._others is not None and not uploader.has_something and now_s - self._flushed_s >= look_s:
            uploader.flush()  # others may have put what was missing
            self._flushed_s = now_s
        while uploader.has_something and (
            at_once or uploader.is_full or now_s - self._flushed_s >= self.settings.flush_s
        ):
            uploader.flush()
            self._flushed_s = now_s = self._env.monotonic_s()
            if (self._closing.is_set() and not at_once) or now_s >= until_s:
                break
            uploader.gather()
        if not self._had_copies and uploader.writer.acknowledged.epochs:
            note_copied_to(self._node.directory.root, self._bucket.url, self._env)
            self._had_copies = True
        if now_s >= self._collect_s and not uploader.writer.is_pending:
            self._collect(uploader, now_s)

    def _collect(self, uploader: Uploader, now_s: float) -> None:
        """Deletes what nothing needs any more, and has put anew what is gone, and packs of which little is used."""
        self._collect_s = now_s + min(
            max(self.settings.grace_s / _COLLECTIONS_PER_GRACE, self._tick_s), _COLLECT_AT_MOST_S
        )
        writer = uploader.writer
        try:
            listing = NodeListing.of(self._bucket, self._names)
            for problem in mend(self._bucket, listing, uploader):
                log.error("%s; it is put again", problem)
            at, index_at = writer.contents.at, writer.index_at
            if index_at < at and at.number - index_at.number >= _PACKS_TO_COLLECT:
                writer.write_index()
            self._collector.collect(writer, listing, uploader.going_objects, now_s)
            uploader.move(self._collector.sparse(writer, listing, self.settings.flush_bytes))
            self._not_collected = ""
        except RemoteTakenError:
            raise
        except RemoteError as error:  # copies go on all the same
            self._not_collected, self._collect_s = str(error), now_s + _LAST_RETRY_S

    def _failed(self, error: Exception) -> None:
        problem = described(error)
        if _TOOK.sub("", problem) != _TOOK.sub("", self._problem):
            log.error("%s", problem, exc_info=not isinstance(error, NosyncError))
        self._problem = problem
        if isinstance(error, RemoteTakenError):
            may_pass = error.by_this_directory or (isinstance(error, OtherHistoryError) and self._others is not None)
            self._is_ended = self._is_ended or not may_pass
            self._uploader, self._pause_s = None, _LAST_RETRY_S
        if isinstance(error, GoneError):
            self._uploader, self._is_checked = None, False
        self._retry_s = self._env.monotonic_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_RETRY_S)

    def _damage(self) -> str:
        uploader = self._uploader
        found = {} if uploader is None else {**uploader.away, **uploader.damaged}
        return next(iter(reversed(found.values())), self._not_collected)

    # --- how far it is ------------------------------------------------------------------------------------------------

    def _safe_point(self, branch: str = MAIN) -> int | None:
        uploader = self._uploader  # the thread may give it up meanwhile
        if uploader is not None:
            others = self._others.reached if self._others is not None else ()
            self._acknowledged = furthest([uploader.writer.acknowledged, *others])
        return remotely_safe(self._node.timelines, self._acknowledged, branch)

    def _note_sealed(self, now_s: float) -> None:
        last, safe = self._node.last_sealed(), self._safe_point()
        while self._sealed and (last is None or self._sealed[-1][0] > last):  # main was rewound
            self._sealed.pop()
        newest = self._sealed[-1][0] if self._sealed else -1 if safe is None else safe
        if last is not None and last > newest:
            self._sealed.append((last, now_s))
        while self._sealed and safe is not None and self._sealed[0][0] <= safe:
            self._sealed.popleft()

    def status(self) -> RemoteStatus:
        """See RemoteCopies."""
        safe, last, uploader = self._safe_point(), self._node.last_sealed(), self._uploader
        first = next((s for t, s in tuple(self._sealed) if safe is None or t > safe), None)
        begin = self._node.manifests().first
        behind = 0 if last is None or begin is None else last - (begin - 1 if safe is None else safe)
        return RemoteStatus(
            self._bucket.url, safe, max(behind, 0),
            round(self._env.monotonic_s() - first, 1) if first is not None and behind > 0 else 0.0,
            0 if uploader is None else uploader.waiting_bytes, 0 if uploader is None else uploader.writer.sent_bytes,
            0 if uploader is None else uploader.writer.packs, self._problem,
        )  # fmt: skip

    def _show(self, now_s: float) -> None:
        """Writes down how far it is, for other processes that look. What cannot be written is not shown."""
        status, before = self.status(), self._shown
        if before is not None and (
            status == before or (_is_alike(status, before) and now_s < self._shown_s + _SHOW_EVERY_S)
        ):
            return
        try:
            write_remote_status(self._node.directory.root, [one.status() for one in self._node.remotes], self._env)
        except OSError as error:
            log.info("not shown: %s", error)
        self._shown, self._shown_s = status, now_s

    # --- for who waits ------------------------------------------------------------------------------------------------

    def push(self, patience_s: float) -> bool:
        """See RemoteCopies."""
        end_s = self._env.monotonic_s() + patience_s
        while True:
            if not self._step_lock.acquire(timeout=max(0.0, end_s - self._env.monotonic_s())):
                return False
            try:
                if self._is_ended:
                    raise RemoteError(self._problem)
                self._step(at_once=True, until_s=end_s)
                uploader, is_well = self._uploader, self._problem in ("", self._not_collected)
                if uploader is not None and is_well and not uploader.has_something:
                    return True
            finally:
                self._step_lock.release()
            if self._env.monotonic_s() >= end_s:
                return False
            if self._closing.is_set():  # it would be no wait: what is left is pushed while the store closes
                time.sleep(self._tick_s)
            else:
                self._closing.wait(self._tick_s)

    def finish(self) -> None:
        """See RemoteCopies."""
        end_s = self._env.monotonic_s() + self.settings.close_s
        self._stop()
        self._push_the_rest(end_s)
        uploader = self._uploader
        if uploader is not None and not self._is_ended and not self._problem and self.settings.close_s > 0:
            try:
                self._collector.say(uploader.writer, self._env.monotonic_s())
            except RemoteError as error:
                log.info("the next process counts anew since when objects are not needed: %s", error)

    def _push_the_rest(self, end_s: float) -> None:
        if self._is_ended or self.settings.close_s <= 0:
            return
        is_all = False
        try:
            is_all = self.push(max(0.0, end_s - self._env.monotonic_s()))
        except NosyncError as error:
            log.error("%s", error)
        if not is_all:
            log.warning("closed before all was copied to %s: %s", self._bucket.url, self._problem or "it took too long")

    def abandon(self) -> None:
        """See RemoteCopies."""
        self._stop()

    def _stop(self) -> None:
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self.settings.close_s)
        self._source.close()


def _is_alike(a: RemoteStatus, b: RemoteStatus) -> bool:
    """Returns whether two say the same of what matters to people."""
    return (a.safe_point, a.lag_epochs, a.problem, a.packs) == (b.safe_point, b.lag_epochs, b.problem, b.packs)
