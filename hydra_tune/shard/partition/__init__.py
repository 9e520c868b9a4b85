"""Where a step is cut, and the plan that comes of it.

The package must not run a unit on real data. Read `plan` first, then `partitioner` (HYDRA's Algorithm 1) and
`quick_partitioner`, which `partition_planner` asks for a `budget`; `plan_cache` makes and keeps a plan for each
`plan_request`, `subgraph` cuts the graph, and `shard_equivalence` finds shards that are alike.
"""
