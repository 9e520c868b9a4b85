"""Faults that are not a trial's own, and loaders that hang.

The package must not decide what a trial's own errors mean. Read `retry` first (a job begins again from its last
checkpoint), then `loader_watchdog`; `task_thread` does what no other thread has time for.
"""
