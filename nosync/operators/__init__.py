"""What each kind of stage does with an epoch: its input's changes and its state in, its own changes out.

Pure functions over whole Arrow tables, without Spark. Above `flow`, below `runtime`.
"""
