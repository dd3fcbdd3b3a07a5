"""The work of a task for one shard of a segment, for one epoch or for several: read, compute, publish, pass on.

`segment_task` says what is to do, `shard_run` does it, over `shard_inputs` (the rows that came) and `shard_state` (the
layers). `epoch_plan` says what an epoch takes, `epoch_parts` runs its parts in order, and `local_part` runs one of them
in this process, and by `shard_workers` beside it. How rows get here: `fused_rows` (by the JVM, with what expressions
say of them), `scan` and `edge_scan` (files that tasks read), `file_shuffle`; `epoch_batches` tells apart those of
several epochs. It runs without Spark, so that tests run it directly. It lies above `operators`, below `spark`.
"""
