"""A trial's own random streams, which its code draws from wherever it draws from the process's.

The package must not know what is trained. Read `rng_streams` first, then `own_python` and `own_numpy`, which route a
thread's draws to the trial's own streams.
"""
