"""Algorithm A: how long each node of a step's graph takes on a device, what memory it needs, and how long copies take.

The package must not know plans: a profile is made once and read by every pass. `output_layouts` finds how results lie
in memory. Read `profiler` first, then `profiling_interpreter`, which runs a graph node by node; `clock_drift` corrects
for a machine whose pace changes, `copy_handoff_cost` for the thread that is handed a copy, and `allocator_rounding` for
what an allocator adds.
"""
