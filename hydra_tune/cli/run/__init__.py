"""Runs a sweep: pool, tuner and display, put together.

The package must not know any tuner by name: entry points do. Read `sweep_run` first, then `tuners`, which finds the
tuner; `task_ref` and `task_building` make the tasks, `interrupt` hears signals, and `export` with `weights_query` gets
weights afterwards.
"""
