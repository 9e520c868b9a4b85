"""How long a trial's units take, before and while it runs.

The package must not schedule: it only tells seconds. Read `unit_times` first, what the scheduler plans by, then
`shared_times` (of trials with one plan), `step_timing` (a few steps run for real) and `fake_trial`, the same units on
tensors without bytes.
"""
