"""A group at work: its members, the slots, and the units that the pool runs.

The package must not plan for less memory: `runtime` does. Read `group_trial` first (the pool runs a group like any
trial), then `member` (a trial's own loop), `slot` and `slot_table` (the slots and their occupants), `membership`
(members advance, end, leave and join) with `member_comparison` (captured steps are still right), and `group_executor` with
`group_step` and `multi_step_unit` (the computation). `batch_bucketing` chooses the members computed next, `resize_policy`
the number of slots; `stacked_state`, `group_rng` and `batched_inputs` stack the members' state, random streams and batches.
"""
