"""Times of a trial's units, before and while the trial runs.

The package must not schedule, only tell seconds. Read `unit_times` first (the scheduler's estimates), then
`shared_times` (of trials with one plan), `step_timing` (a few steps run for real) and `fake_trial`, the same units on
tensors without bytes.
"""
