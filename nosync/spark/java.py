"""The Java that Spark's JVM runs on: whether it is there, how it collects its garbage, and how it talks to Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nosync.lsm.errors import NosyncError
from nosync.lsm.platform.process import numpy_environment

OLDEST_JAVA = 17
_COLLECTOR = re.compile(r"-XX:\+Use\w*GC\b")
_UNIX_SOCKETS, _DAEMON = "spark.python.unix.domain.socket.enabled", "spark.python.daemon.module"
_OPTIONS = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS")
"""Environment variables in which options of the JVM may be."""
_NONE: Mapping[str, object] = {}


def check_java() -> None:
    """Raises NosyncError saying what to install where there is no Java runtime that Spark can use."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    advice = f"Spark needs a Java {OLDEST_JAVA}+ runtime: on Debian or Ubuntu `apt-get install openjdk-17-jre-headless`"
    if not java or not os.path.exists(java):
        where = f"JAVA_HOME={home} has no bin/java" if home else "no `java` on PATH and JAVA_HOME is not set"
        raise NosyncError(f"{where}. {advice}")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    text = answer.stderr + answer.stdout
    found = re.search(r'version "([^"]+)"', text)  # after a note, where JDK_JAVA_OPTIONS is set
    version = found[1] if found else ""
    major = version.split(".")[0].split("-")[0]
    if not major.isdigit() or int(major) < OLDEST_JAVA:
        raise NosyncError(f"{java} is version {version or 'unknown'}. {advice}")


def launch_settings(options: Mapping[str, object]) -> dict[str, str]:
    """Returns settings that only count when a session's JVM starts, without those that somebody chose. `options`: a
    builder's.
    """
    workers = {f"spark.executorEnv.{name}": value for name, value in numpy_environment().items()}
    found = workers | collector_settings(options) | socket_settings(options)
    return {name: value for name, value in found.items() if name not in options}


def collector_settings(options: Mapping[str, object] = _NONE) -> dict[str, str]:
    """Returns Spark's setting for a garbage collector that suits epochs; none where somebody has chosen one.

    What planning an epoch leaves behind is garbage soon. Parallel collections of a small heap hold tasks up for less
    time than G1's, and leave its barriers out of everything else (`bench/spark_session.py`). Two choices would end the
    JVM at once.
    """
    if any(_COLLECTOR.search(text) for text in _chosen(options)):
        return {}
    return {"spark.driver.defaultJavaOptions": "-XX:+UseParallelGC"}


def socket_settings(options: Mapping[str, object] = _NONE) -> dict[str, str]:
    """Returns Spark's setting for Unix sockets between JVM and Python workers; none where somebody has chosen.

    Over TCP the end of what the JVM sends to a task often waits for an acknowledgement that the kernel puts off for 40
    ms (Nagle's algorithm and delayed acknowledgements; `bench/spark_session.py`).
    """
    if any(name in text for text in _chosen(options) for name in (_UNIX_SOCKETS, _DAEMON)):
        return {}
    return {_UNIX_SOCKETS: "true", _DAEMON: "nosync.spark.worker_daemon"}


def _chosen(options: Mapping[str, object]) -> list[str]:
    """Returns the texts in which options may have been chosen before a session is made; `options`: of its builder."""
    chosen = [os.environ.get(name, "") for name in _OPTIONS]
    chosen += [f"{name}={value}" for name, value in options.items()]
    home = os.environ.get("SPARK_HOME")
    directory = os.environ.get("SPARK_CONF_DIR") or (os.path.join(home, "conf") if home else None)
    if directory is not None:
        defaults = Path(directory) / "spark-defaults.conf"
        chosen += [defaults.read_text(errors="replace")] if defaults.is_file() else []
    return chosen
