"""Groups whose steps do not fit a device: planned by `hydra_tune.planner`, and run as the plan says.

The package must not decide on swaps: the planner does. Read `step_planner` first, then `step_arguments` (a
group's state as a graph's arguments) and `planned_unit`, which runs on `planned_executor`; `plan_autotuner` measures
the ways, `planned_group_size` chooses among sizes, and `pair_trial` with `paired_unit` runs two groups in turn.
"""
