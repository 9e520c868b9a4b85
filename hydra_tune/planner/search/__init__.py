"""Looks for the fastest way to train the trials of a device within its memory.

The package must not know groups or devices: steps are counts and profiles here. Read `portfolio` first, which plans
every way that `partitions` allows and takes the fastest; `autotune` corrects predictions by what the best few take when
they run, and `tournament` has candidates run in turns until the slower ones are out; `figures` has the paper's Figures
3 and 9.
"""
