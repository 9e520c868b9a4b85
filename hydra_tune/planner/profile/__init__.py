"""Algorithm A: how long each node of a step's graph takes on a device, its memory, and how long copies take.

`StepPlanner` (`fusion/runtime/step_planner.py`) has steps profiled before any plan. The package must not know plans:
every pass reads the same profile. Read `profiler` first, then `profiling_interpreter`, which runs a graph node by node.
`output_layouts` finds how results lie in memory, `clock_drift` corrects for a machine whose pace changes,
`copy_handoff_cost` measures the hand-over of copies to another thread, and `allocator_rounding` adds the rounding of an
allocator.
"""
