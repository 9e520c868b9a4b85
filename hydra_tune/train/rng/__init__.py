"""A trial's own random streams: the trial's code draws from the trial's streams in place of the process's.

Read `rng_streams` first, then `own_python` and `own_numpy`, which route a thread's draws to the trial's own streams. These
modules must not know models; only `recurrent_dropout`, for masks that cuDNN draws, looks at a module.
"""
