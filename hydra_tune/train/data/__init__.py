"""The batches of one trial, as a loop in a process of its own would draw them.

The package must not know models, steps or the pool's devices. Read `handles` first (from a task's data to batches), then
`data_feed`, which draws from the trial's own copies (`loader_copies`, `loader_state`). `loader_workers` with `worker_parts` and
`worker_server` starts worker processes, `loader_clock` times a draw, and `index_gather` draws indices in place of samples.
"""
