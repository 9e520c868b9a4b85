"""A run of a real pool, recorded and played again.

The package must not import the pool: a recording is plain values. Read `recording` first, then `script` (what each job
does by itself) and `replay`, which makes the schedule anew; `pager_model` has the pagers on a virtual clock.
"""
