"""The host tier: host copies of blocks within a budget of host memory, beyond which they go to disk.

The package must not know devices: the pager asks it for room. Read `host_tier` first, then `host_eviction` (which copy
goes first), `disk`, the thread with the files, and `spill_dir`, the folder that it writes to.
"""
