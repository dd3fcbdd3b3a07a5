"""Who uses a daemon: a job's store beside it, tasks that fetch what their host lacks, a store that is read from
elsewhere.

Above `transport`; the daemon is only spoken to. `nosync.runtime` may import `location` and `fetching_directory` only.
"""
