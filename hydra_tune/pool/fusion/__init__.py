"""Horizontal fusion in a pool: jobs whose trials may be one group are run as one job.

The package must not know how a group computes: `hydra_tune.fusion` does. Read `fused_pool` first, then `fused_job` and
`job_table`; `group_matcher` finds jobs that may be one group, `group_jobs` runs them, `live_group` is a group under
way, and `group_completion` ends it; `fusion_hint` says once that fusion would be faster.
"""
