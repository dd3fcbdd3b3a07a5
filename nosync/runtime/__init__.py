"""What a task does for one shard of a segment, for one epoch or for several: read, compute, publish, pass on.

Without Spark, so that tests run it directly. Above `operators`, below `spark`.
"""
