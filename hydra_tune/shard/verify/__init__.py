"""Every new plan is held against the eager step before it is used, and optimizers against being stepped in parts.

The package must not change a plan. Read `plan_check` and `step_outcome` first, then `sample_check` (a step of a few
samples), and `separable_optimizers` and `elementwise_optimizers`; `process_state` puts back what trying on copies has
moved.
"""
