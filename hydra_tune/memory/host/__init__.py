"""The host tier: keeps host copies of blocks within a budget of host memory, and moves the others to disk.

The package must not copy to devices: the pager asks the tier for room. Read `host_tier` first (its note explains
why every wait ends), then `host_eviction` (which copy goes first), `disk` (the thread with the files) and `spill_dir` (the
folder of the files).
"""
