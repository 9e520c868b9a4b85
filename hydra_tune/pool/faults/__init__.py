"""Faults that are not a trial's own, and loaders that hang.

The package must not retry a trial after an error of its own code. Read `retry` first (a job begins again from its last
checkpoint), then `loader_watchdog`; `task_thread` runs calls that would block other threads.
"""
