"""From a model and its step to shards: capture, cut, pilot, and the arithmetic of one shard unit.

The package must not know trials over time, the pager, or the schedule: `train/` runs the units of each trial, and
`fusion/` stacks the captured graphs of several trials. Read `capture` and `analysis` first, then `partition` (the cuts),
`cost` (the pilot) and `execute` (the units); `verify` compares each plan with the eager step, `python_state` follows the
Python values that a step reads, `operators` cuts single operators, and `fake` runs units on tensors without bytes.
"""
