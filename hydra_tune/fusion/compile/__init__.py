"""The plans of a group: one member's plan on stacked members, traced, compiled or recorded as a CUDA graph.

The package must not know who is in a group. Read `batched_plan` first, then `batched_plan_cache`, which keeps one for
each kind of batch and size, and `group_plan_cache`, which hands them to a group; `torch_compile` and `cuda_graph_steps`
are two faster ways to run a traced step.
"""
