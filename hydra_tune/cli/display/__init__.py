"""How a sweep is shown while it runs.

The package must not run anything. Read `output` first (live view, lines or JSON), then `board`, where the threads that
run and draw meet, and `trial_views`; `next_step` tells how a sweep goes on, `log_file` says where the event log goes,
and `isolation` whether a sweep has a process of its own and what is shown when that process crashes.
"""
