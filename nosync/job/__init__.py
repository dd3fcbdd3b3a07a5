"""A job: one flow, one store and one Spark session; epochs, branches, replay, recovery, backfill, sinks, reports.

`job` is the public class, and puts the others together: epoch_runs, backfill, reading, branching, replay and recovery,
over one `Position`, flow_versions, epoch_layout and sealing. None of them knows the job. It lies above `spark`, below
the command line.
"""
