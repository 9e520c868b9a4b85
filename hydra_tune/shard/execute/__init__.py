"""The arithmetic of one shard unit, and a step as a chain of units.

The package must not know blocks or devices' budgets. Read `compute` first (its notes explain why the numbers are equal),
then `chain`. `saved_activations` moves the tensors saved by autograd out of its graph, and `eager_plan` runs a step that
cannot be captured as a single shard.
"""
