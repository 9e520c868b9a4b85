"""Forecasts of the memory, transfers and seconds that tasks would need, made before any training.

The package must not touch a running job. Read `report` first, then `executor` (steps rehearsed on tensors without
bytes) and `fusion_report`; `simulator_profile` and `step_profiles` make profiles, and `plan_failures` words the
errors of tasks that cannot be planned.
"""
