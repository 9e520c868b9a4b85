"""Plain values of a pool's jobs, for displays and logs.

The package must change nothing. Read `live_snapshot` first, then `job_views` and `eta`; `live` shows a pool while a
`with` block runs, and `job_logging` writes the lives of jobs into the event log.
"""
