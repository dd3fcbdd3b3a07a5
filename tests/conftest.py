"""Fixtures and settings that all tests share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import nosync
from tests.helpers.long_suites import target_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Times of single examples vary with the machine; nothing here is about them.
settings.register_profile(
    "nosync", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("nosync")

# Spark's JVMs live for minutes here: what the optimizing compiler and a parallel collector take is not won back in that time.
# Without that compiler a JVM keeps 48 MB for compiled code: a few tests fill it, and methods are thrown out and compiled again.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC")

# Daemons without TLS meet in a directory of the user's, where the sockets of those stay that tests kill.
_STATE = tempfile.TemporaryDirectory(prefix="nosync-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name


@pytest.fixture(autouse=True, scope="session")
def daemons_start_fast() -> Iterator[None]:
    """Daemons are forked from a process that has imported all, which begins with the first of them."""
    with pytest.MonkeyPatch.context() as patched:
        with contextlib.suppress(ImportError):  # of gRPC: the suite on other versions has no daemons
            from nosync.testing.daemon_cluster import Daemons
            from tests.helpers.forking import start_forked

            patched.setattr(Daemons, "start_process", staticmethod(start_forked))
        yield


OpenStore = Callable[..., nosync.Store]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is marked `long`, unless a target of the long suites runs. Of the cases of a test that is marked `few`
    all but the first ones are long.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("few")) is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > marker.args[0]:
                item.add_marker(pytest.mark.long(*marker.args[1:]))
    for item in items:
        target = target_of(item)
        if target is not None and not os.environ.get("NOSYNC_LONG"):
            item.add_marker(pytest.mark.skip(reason=f"of the long suite: {target}"))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens stores under the test's own directory, and closes those that the test left open."""
    opened: list[nosync.Store] = []

    def open_(name: str = "store", **options: Any) -> nosync.Store:
        options.setdefault("settings", nosync.StoreSettings(background=False, grace_s=0.0, retry_s=0.0))
        store = nosync.open(tmp_path / name, **options)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        with contextlib.suppress(nosync.NosyncError):  # a test may have broken its disk on purpose
            store.close()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from nosync.spark.data_source import register
    from nosync.spark.session import DRIVER_MAX_BYTES, local_session

    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # Epochs of tests are small, and most tests are of what Spark does with them: who tests the driver sets it.
    settings = {DRIVER_MAX_BYTES: "0"}
    if not os.environ.get("NOSYNC_LONG"):
        settings["spark.sql.codegen.wholeStage"] = (
            "false"  # which compiles Java for every plan: longer than plans of tests run
        )
    session = local_session(2, "nosync-tests", settings=settings)
    register(session)  # which sets what stays set
    yield session
    session.stop()


_OF_NO_EFFECT = ("spark.app.name", "spark.master")
"""On a session that is there: what docs say for a new one sets them all the same."""


def _session_state(spark: SparkSession) -> set[str]:
    """Settings and views, as the JVM says them in one go: PySpark asks for each by itself, which took 0.1 s a test."""
    session = spark._jsparkSession
    said = [session.conf().getAll(), session.sessionState().catalog().listLocalTempViews("*")]
    entries = {entry for each in said for entry in each.toString().partition("(")[2].removesuffix(")").split(", ")}
    return {entry for entry in entries if not entry.startswith(_OF_NO_EFFECT)}


@pytest.fixture(autouse=True)
def session_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share one session and run in any order: who leaves a setting or a view behind fails, not who comes after."""
    if "spark" not in request.fixturenames:
        yield
        return
    spark = request.getfixturevalue("spark")
    # Where a test made a session of its own, that one would stay active: Spark plans `frame.rdd` by the active session.
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    before = _session_state(spark)
    yield
    assert _session_state(spark) ^ before == set()
