"""Decides which trials form a group, and how many trials compute together.

The package must not train a group: only `group_timing` runs steps, on copies that are then discarded. Read `fusion_key`
first (the trials that may share a group, and the reason why a trial may not), then `plan_diff`, which compares the
members' plans, and `group_size_chooser`, which gets step times from `group_timing` and a size from `group_size_policy`.
"""
