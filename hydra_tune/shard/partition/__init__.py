"""The cuts of a step into shards, and the plans made of the shards.

The package runs no unit itself; `shard/verify/` runs the units of a new plan, on copies. Read `plan` first, then
`partitioner` (HYDRA's Algorithm 1) and `partition_planner`, which cuts for a `budget`. `plan_cache` makes and keeps a plan
for each `plan_request`, `trial_step` captures the step, `subgraph` cuts the graph, and `shard_equivalence` finds shards that
are alike. `gradient_rules` has the task's rules for gradients.
"""
