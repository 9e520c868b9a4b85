"""Traces a sub-array's step as one flat graph: forward, backward, clipping, and each parameter's update.

The package must not know memory limits or schedules: a step has the same graph under every plan. Read `step_graph`
first, which asks `optimizer_graph` for each update and `grad_clip_graph` for the factors of clipping; `unsupported_ops`
names the operators and tensors that keep a step from being traced. `StepPlanner` (`fusion/runtime/step_planner.py`) and
`TaskProfileCache` (`fusion/runtime/task_profiles.py`) trace while no trial computes.
"""
