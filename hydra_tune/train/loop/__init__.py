"""Optimizer steps in their order: as units that the pool can run, and as the plain loop.

The package must not know where blocks are or which device comes next. Read `reference_loop` first, then `batch_units`
(a batch as units), `optimizer_step` and `training_batch`; `burst` and `direct` run a trial's own code whole,
`microbatches` cuts batches, `plan_cache` keeps a plan for each kind of batch, and `unit_rollback` undoes a unit.
"""
