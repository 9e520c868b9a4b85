"""The arithmetic of one shard unit, and a step as a chain of units.

The package must not know blocks or devices' budgets. Read `compute` first (why the numbers are equal), then `chain`;
`saved_activations` takes what autograd saves out of its graph, and `eager_plan` runs a step that cannot be captured as
one shard.
"""
