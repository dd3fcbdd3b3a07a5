"""A job: one flow, one store and one Spark session; epochs, branches, replay, recovery, backfill, sinks, reports.

Above `spark`, below the command line.
"""
