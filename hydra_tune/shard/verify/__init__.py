"""Checks before use: compares each new captured plan with the eager step, and an optimizer's step with its steps in parts.

The package must not change a plan. Read `plan_check` and `step_outcome` first, then `value_numbering` (a step without
arithmetic), `sample_check` (a step of a few samples), `separable_optimizers` and `elementwise_optimizers`.
`process_state` restores random streams and the number of threads after trials of code on copies.
"""
