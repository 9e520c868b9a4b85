"""A pool in a process of its own, which the program steers: `HydraExecutor(isolate=True)`. See docs/faults.md."""
