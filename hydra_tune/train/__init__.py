"""The course of one trial over time: drawing batches, epochs, evaluation, schedulers, reports.

The package must not know the pool or the scheduler: a trial yields units, and whoever runs them tells it of their ends.
Read `loop/reference_loop` first, the plain loop that every other way to train is held against, then `trial`, which does
the same as a sequence of units. The packages: `loop` (steps), `data` (batches), `state` (tensors), `rng`, `parallel`
(one trial on several devices), `checkpoint`, `timing`.
"""
