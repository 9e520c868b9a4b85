"""Runs a sweep: pool, tuner and display, put together.

The package must not import any tuner: entry points lead from the names `optuna` and `ray` to the tuners. Read
`sweep_run` first, then `tuners`, which finds the tuner; `cluster` is for `--ray`, `task_ref` and `task_building` make
the tasks, `interrupt` hears signals, and `export` with `weights_query` writes weights and results.
"""
