"""The plans of a group: a single member's plan on stacked members, traced, compiled or recorded as a CUDA graph.

The package must not decide which trials are in a group. Read `batched_plan` first, then `batched_plan_cache` (a plan for
each kind of batch and size) and `group_plan_cache` (the plans of a single group); `torch_compile` and
`cuda_graph_steps` are two faster ways to run a traced step.
"""
