"""The batches of one trial, as a loop in a process of its own would draw them.

The package must not know steps or devices. Read `handles` first (from what a task names to batches), then `data_feed`,
which draws from the trial's own copies (`loader_copies`, `loader_state`); `loader_workers` with `worker_parts` and
`worker_server` starts processes, `loader_clock` notes since when a draw lasts, and `index_gather` draws indices alone.
"""
