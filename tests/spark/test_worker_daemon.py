"""Workers whose connection Spark's JVM closes say nothing."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile

import psutil
import pytest

from nosync.testing.daemon_cluster import eventually


def said_of_a_worker_that_the_jvm_ends(module: str, sockets: str) -> str:
    """Does what the JVM does: starts the daemon, asks it for a worker, closes the worker's socket, ends the daemon."""
    environment = {
        **os.environ,
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": sockets,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", module, "pyspark.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        (length,) = struct.unpack("!i", process.stdout.read(4))
        path = process.stdout.read(length).decode()
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            (pid,) = struct.unpack("!i", worker.recv(4))
        assert pid != process.pid
        eventually("the worker has ended", lambda: not psutil.pid_exists(pid))
        process.stdin.close()
        return process.stderr.read().decode()  # when the worker has ended as well


@pytest.mark.parametrize("module", ["nosync.spark.worker_daemon", "pyspark.daemon"])
def test_a_worker_that_the_jvm_ends_says_nothing(module: str) -> None:
    with tempfile.TemporaryDirectory() as sockets:  # not tmp_path: the path of a socket has room for 107 characters
        said = said_of_a_worker_that_the_jvm_ends(module, sockets)
    assert ("BrokenPipeError" in said) == (module == "pyspark.daemon"), said
    assert module == "pyspark.daemon" or not said
