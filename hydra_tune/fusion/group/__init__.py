"""A group at work: its members, their slots, and the units that the pool runs.

The package must not plan for less memory: `runtime` does. Read `group_trial` first, which the pool runs as it runs any
trial, then `member` (one trial's loop), `slot` and `slot_table` (who has which place), `membership` (who comes and
goes), and `group_executor` with `group_step` and `multi_step_unit`, which compute.
"""
