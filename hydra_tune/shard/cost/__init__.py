"""Bytes and seconds of units, known before any unit runs.

The package must not know the pager, and reads the clock only to time an optimizer (`optimizer_placement`). Read `pilot`
first (units run on fake tensors; `workspace` adds bytes that fake tensors hide), then `eager_pilot` and `update_pilot`.
`traffic_model` counts the bytes that a step moves, and `compute_estimate` and `step_estimate` predict the seconds;
`microbatch_search`, `optimizer_placement` and `activation_policy` choose by these figures.
"""
