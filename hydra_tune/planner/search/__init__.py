"""Looks for the fastest way to train the trials of a device within its memory.

`fusion/runtime/` asks for the plans of groups, and `pool/dry_run/step_profiles.py` for figures. The package must not
know groups or devices: steps are counts and profiles here. Read `portfolio` first, which plans every way that
`partitions` allows and takes the fastest. `autotune` corrects the predictions by measured steps, `tournament` runs
candidates in turns and drops the slower ones, and `figures` has the paper's Figures 3 and 9.
"""
