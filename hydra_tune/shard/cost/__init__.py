"""Bytes and seconds of units, known before any unit runs.

The package must read no clock and no pager. Read `pilot` first (units run on fake tensors), then `eager_pilot` and
`update_pilot`; `traffic_model` counts the bytes that a step moves, `compute_estimate` and `step_estimate` the seconds,
and `microbatch_search`, `optimizer_placement` and `activation_policy` choose by them.
"""
