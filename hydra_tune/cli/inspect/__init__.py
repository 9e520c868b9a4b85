"""Answers about runs: which there are in a folder or a storage, how far they are, and their trials.

The package must not import torch, train anything or import a tuner: studies come through a `StudyReader`, found by
entry point. Of Optuna, only `run_scan` knows the name, and how its tables and nameless studies look. Read
`study_record` first, the interface to that reader, then `run_scan`, which joins studies, event logs and sweep files to
runs, and `sweep_run_record`, which says in which state a run is; `run_output` and `trial_output` print.
"""
