"""A pool in a separate process, steered by the program: `HydraExecutor(isolate=True)`. See docs/howto/faults.md."""
