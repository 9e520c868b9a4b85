"""Plain values of a pool's jobs, for whoever shows or logs them.

The package must change nothing. Read `live_snapshot` first, then `job_views` and `eta`; `live` shows a pool while a
`with` block runs, and `job_logging` writes what becomes of jobs into the event log.
"""
