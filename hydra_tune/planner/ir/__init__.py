"""The planner's representation of a step: operators and storages with their times and sizes, decisions, and instructions.

The package must not know devices, clocks or how a plan is found: passes read and write these values, and only
`aliasing` runs a graph. Read `step_profile` first (tables A and B of the paper), then `plan_state`, which holds the
decisions, and `instructions`, to which `lowering` brings a decided schedule; `verify` checks a finished schedule and a
merged graph. `lineage` tells how a feature map can be computed again, and `planner_ops` names the nodes of planned
graphs that are no operators.
"""
