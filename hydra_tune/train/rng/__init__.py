"""A trial's own random streams: the trial's code draws from them wherever a plain loop draws from the process's streams.

The package must not know models. Read `rng_streams` first, then `own_python` and `own_numpy`, which route a
thread's draws to the trial's own streams.
"""
