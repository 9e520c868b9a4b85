"""A pool in a separate process, steered by the program: `HydraExecutor(isolate=True)`. See docs/howto/faults.md.

Read `parent` first (the program's side), then `child` (the pool's process) and `sending` (objects on their way). The
supervisor between both processes is `hydra_tune.supervision`. The package must not know how a pool trains.
"""
