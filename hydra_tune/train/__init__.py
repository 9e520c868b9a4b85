"""The course of one trial over time: drawing batches, epochs, evaluation, schedulers, reports.

The package must not know the pool or the scheduler: a trial yields units, and the runner of a unit tells the trial when
the unit has ended. Read `loop/reference_loop` first, the plain loop with which every other way to train is compared,
then `single_trial`, which runs the same loop as a sequence of units. `own_code_trial` has the steps by the user's own
code, `trial` the beginning, checkpoints and end of a trial, and `trial_figures` the figures for the pool. The packages:
`loop` (steps), `data` (batches), `state` (tensors), `rng` (random streams), `parallel` (one trial on several devices),
`own_loop` (loops of the user's own), `checkpoint`, `timing`.
"""
