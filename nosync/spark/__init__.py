"""The Spark side: everything that imports pyspark. Tasks run in Spark's Python workers, the rest in the driver.

`runner` runs a job's epochs by `epoch_run`. Of each part of an epoch, which `nosync.runtime.epoch_plan` plans,
`epoch_frames` builds the query and `epoch_job` runs it. `session`, `java`, `worker` and `worker_daemon` stay where they
are, for users name them. It lies above `runtime`, below `job`.
"""
