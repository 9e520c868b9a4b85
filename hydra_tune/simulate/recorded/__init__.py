"""A run of a real pool, recorded and played again.

The package must not import the pool: a recording is plain values, which the pool makes. Read `recording` first, then
`script` (the behaviour of each job by itself) and `replay`, which makes the schedule anew; `pager_model` has the pagers on a
virtual clock.
"""
