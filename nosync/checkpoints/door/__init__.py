"""The door: the checkpoints of running queries behind WebHDFS, whose client every pyspark has.

A query whose checkpointLocation is the door's address writes through it. What it publishes is taken into the keep, in
the order in which it was published. The door may hold an answer back until copies are there, which nobody beside the
query can. On several hosts one door serves a checkpoint, and the others send on to it what they are asked.

`api` is its face; `server` alone knows the HTTP library. It imports the rest of nosync.checkpoints, and is imported by
its face and the command line.
"""
