"""What the programs of Flink share. Runs in Flink's own environment."""

from __future__ import annotations

from typing import Any

from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableEnvironment

BASE = {
    "parallelism.default": "2",
    "state.backend.type": "rocksdb",
    "execution.checkpointing.incremental": "true",
    "execution.checkpointing.interval": "1s",
    "taskmanager.memory.process.size": "4g",
    "rest.bind-port": "0",
}


def table_environment(about: dict[str, Any]) -> TableEnvironment:
    """For streams, with RocksDB and checkpoints into `about["checkpoints"]`; `about["settings"]` are more of Flink's."""
    configuration = Configuration()
    for name, value in {
        **BASE,
        "execution.checkpointing.dir": about["checkpoints"],
        **about.get("settings", {}),
    }.items():
        configuration.set_string(name, value)
    settings = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    return TableEnvironment.create(settings)
