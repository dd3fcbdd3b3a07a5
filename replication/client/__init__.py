"""Who uses a daemon: a job's store beside it, tasks that fetch what their host lacks, a store that is read from elsewhere.

The top floor of replication. `nosync.runtime` may import `fetching_directory` only.
"""
