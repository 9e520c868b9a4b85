"""Decides which trials make one group, and how many of them.

The package must not run a group: trials are keys, captured graphs and timings here. Read `fusion_key` first (which
trials may be one group, and why one stays out), then `plan_diff`, which compares the members' plans, and
`group_size_chooser`, which asks `group_timing` for seconds and `group_size_policy` for a size.
"""
