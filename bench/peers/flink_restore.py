"""A keyed aggregation in Flink, stopped with a native savepoint and begun again from it. Runs in Flink's own environment.

`{"keys": ..., "pad_bytes": ..., "rows_per_s": ..., "checkpoints": DIR, "settings": {...}}`
Prints JSON: how large the savepoint is, and how long it takes from the submission until every task has its state and runs.
The job runs in a cluster of this process, which starts with it.
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

from flink_failure import Job, submit, wait_for  # of the directory that this program is in
from pyflink.java_gateway import get_gateway


def begun(about: dict[str, Any], **settings: str) -> tuple[Any, str]:
    """Starts the job with a cluster. Returns what can stop it, and where the cluster answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    more = {"rest.port": str(port), "rest.bind-port": str(port), "rest.address": "127.0.0.1", **settings}
    result = submit({**about, "settings": {**about.get("settings", {}), **more}})
    return result.get_job_client(), f"127.0.0.1:{port}"


def job_at(address: str) -> Job:
    """Waits for a cluster that starts, and returns its job."""
    found: list[Job] = []

    def is_there() -> bool:
        try:
            found.append(Job(address))
        except (OSError, IndexError):
            return False
        return True

    wait_for(is_there)
    return found[0]


def main() -> None:
    about = json.load(sys.stdin)
    client, address = begun(about)
    wait_for(job_at(address).is_loaded)
    native = get_gateway().jvm.org.apache.flink.core.execution.SavepointFormatType.NATIVE
    # Python's own call has no formats.
    savepoint = client._j_job_client.stopWithSavepoint(False, f"{about['checkpoints']}/savepoint", native).get()
    size_bytes = sum(path.stat().st_size for path in _files_of(savepoint))
    begin = time.monotonic()
    client, address = begun(about, **{"execution.state-recovery.path": savepoint})
    seconds = wait_for(job_at(address).runs) - begin
    client.cancel().result()
    version = importlib.metadata.version("apache-flink")
    print(json.dumps({"seconds": seconds, "state_bytes": size_bytes, "version": version}))


def _files_of(savepoint: str) -> list[Path]:
    root = Path(urllib.parse.urlparse(savepoint).path)
    return [path for path in root.rglob("*") if path.is_file()]


if __name__ == "__main__":
    main()
