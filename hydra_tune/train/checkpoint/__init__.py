"""A trial's state between two steps: read from the trial, and restored into a newly built trial.

The package must not write files: `hydra_tune.checkpoint` writes, and only `weights` reads. Read `trial_checkpoint`
first, then `snapshot` (copies under locks) and `compatibility`, which compares a checkpoint with a task.
`attribute_diff` finds changed attributes of the user's objects, `python_changes` names what a resumed trial's functions
have lost, and `weights` loads a model alone.
"""
