"""From a model and its step to shards: capture, cut, pilot, and the arithmetic of one shard unit.

The package must not know trials over time, the places of bytes, or the schedule. Read `capture` and `analysis` first, then
`partition` (the cuts), `cost` (the pilot) and `execute` (the units); `verify` compares each plan with the eager step,
`operators` cuts single operators, and `fake` runs units on tensors without bytes.
"""
