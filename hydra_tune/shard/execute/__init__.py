"""The arithmetic of one shard unit, and a step as a chain of units.

`compute`, `chain` and `saved_activations` must not know leases of blocks or devices' budgets. Read `compute` first (its
notes explain why the numbers are equal), then `chain`. `saved_activations` moves the tensors saved by autograd out of
its graph. `eager_plan` makes the plan of a step that cannot be captured, a single shard that must fit the budget.
"""
