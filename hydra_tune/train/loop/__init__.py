"""Optimizer steps in their order: as units that the pool can run, and as the plain loop.

The package must not know where blocks are or which device comes next. Read `reference_loop` first, then `batch_units`
(a batch as units), `optimizer_step` and `training_batch`; `burst` and `direct` run a trial's own code whole,
`workspace_tracker` takes room for that code, `gradient_rules` scales and clips, `microbatches` cuts batches,
`microbatch_choice` chooses the number of pieces, `plan_cache` keeps plans for each kind of batch, `step_comparison`
compares a captured step with the eager step, and `unit_rollback` undoes a unit.
"""
