"""Hosts that are lost while an epoch runs, as the nodes of the store notice it.

Spark learns that a process died from its closed connection, and waits two minutes for one that says nothing any more: a
frozen host, one that is cut off, one whose power went. The daemons of the store notice within two seconds. Then the
epoch's tasks are cancelled and the host's executors taken out, so that the epoch can run again without them at once.
That a host was suspected wrongly changes no result: what its tasks still publish are the layers that anyone would
publish.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from nosync.lsm.errors import NodeLostError

log = logging.getLogger("nosync")

LOOK_EVERY_S = 0.25
_INTERRUPT = "spark.job.interruptOnCancel"
"""The property of a thread that `setInterruptOnCancel` sets."""
T = TypeVar("T")


class HostWatch:
    """Runs a job's work on Spark, and cancels it when a host is lost that has executors. `lost_hosts`: asks the daemon.

    Where only the daemon of a host is gone, Spark starts executors there again and again; these are taken out as they
    come, without cancelling anything.
    """

    def __init__(self, spark: SparkSession, lost_hosts: Callable[[], frozenset[str]]) -> None:
        self._context = spark.sparkContext
        self._lost_hosts = lost_hosts
        self._here = _addresses([self._context.getConf().get("spark.driver.host", "localhost")])
        self._lock = threading.Lock()
        self._lost: set[str] = set()  # those whose tasks were cancelled, as long as they stay lost

    def run(self, work: Callable[[], T]) -> T:
        """Runs the work. Raises NodeLostError where a host was lost meanwhile, and else what the work raises."""
        tag = f"nosync-{secrets.token_hex(8)}"
        done = threading.Event()
        newly: set[str] = set()
        watch = threading.Thread(target=self._watch, args=(tag, done, newly), name="nosync-hosts", daemon=True)
        self._context.addJobTag(tag)
        before = self._context.getLocalProperty(_INTERRUPT)
        self._context.setInterruptOnCancel(True)  # a task may be waiting for a shuffle block of the lost host
        watch.start()
        try:
            return work()
        except Exception as error:
            if newly:
                raise NodeLostError(
                    f"nothing was heard of host {', '.join(sorted(newly))} while the epoch ran; its tasks were cancelled"
                ) from error
            raise
        finally:
            done.set()  # not waited for: it may be asking a daemon that does not answer
            self._context.setLocalProperty(_INTERRUPT, before)  # type: ignore[arg-type]  # None takes it away
            self._context.removeJobTag(tag)

    def _watch(self, tag: str, done: threading.Event, newly: set[str]) -> None:
        while not done.wait(LOOK_EVERY_S):
            try:
                self._look(tag, done, newly)
            except Py4JError as error:
                log.warning("cannot ask Spark for its executors: %s", error)

    def _look(self, tag: str, done: threading.Event, newly: set[str]) -> None:
        gone = _addresses(self._lost_hosts()) - self._here
        with self._lock:
            if done.is_set():
                return
            self._lost = {host for host in self._lost if _addresses([host]) & gone}
            executors = self._executors() if gone else {}
            lost = {id: host for id, host in executors.items() if _addresses([host]) & gone}
            self._take_out(lost)
            fresh = set(lost.values()) - self._lost
            if fresh:
                log.warning("nothing is heard of hosts %s: their tasks run elsewhere", ", ".join(sorted(fresh)))
                newly |= fresh
                self._lost |= fresh
                self._context.cancelJobsWithTag(tag)

    @property
    def _scala(self) -> Any:
        return self._context._jsc.sc()

    def _executors(self) -> dict[str, str]:
        """Returns the host of each executor."""
        found = {}
        executors = self._scala.statusStore().executorList(True)
        for i in range(executors.size()):
            executor = executors.apply(i)
            if executor.id() != "driver":
                found[str(executor.id())] = str(executor.hostPort()).rpartition(":")[0]
        return found

    def _take_out(self, lost: dict[str, str]) -> None:
        """Tells the scheduler that executors are gone, as it would find out itself two minutes later."""
        jvm: Any = self._context._jvm
        backend = self._scala.schedulerBackend()
        for id, host in lost.items():
            why = jvm.org.apache.spark.scheduler.ExecutorProcessLost(
                f"nothing is heard of host {host}", jvm.scala.Option.apply(host), False
            )
            try:
                backend.removeExecutor(id, why)
            except Py4JError as error:  # a scheduler of another kind: its tasks are cancelled all the same
                log.warning("executor %s stays in Spark's list until Spark notices by itself: %s", id, error)


def _addresses(hosts: Any) -> set[str]:
    found: set[str] = set()
    for host in hosts:
        with contextlib.suppress(OSError):
            found |= {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    return found
