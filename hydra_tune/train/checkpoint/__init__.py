"""A trial's state between two steps, out of the trial and into one that has just been built.

The package must not know files: `hydra_tune.checkpoint` writes. Read `trial_checkpoint` first, then `snapshot` (copied
under locks) and `compatibility`, which says whether a checkpoint fits a task; `attribute_diff` finds what a user's
objects keep beside tensors, and `weights` loads a model alone.
"""
