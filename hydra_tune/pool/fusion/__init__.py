"""Horizontal fusion in a pool: jobs whose trials may be one group are run as one job.

The package must not know how a group computes: `hydra_tune.fusion` does. Read `fused_pool` first, then `fused_job` and
`job_table`; `group_jobs` runs jobs alone or as a group, `group_matcher` finds the members of a group, `live_group` is a
running group, and `group_completion` handles the ends; `group_loaders` shows the loader watch the members that draw,
and `fusion_hint` logs once that fusion would be faster.
"""
