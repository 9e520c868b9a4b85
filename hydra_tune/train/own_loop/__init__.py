"""Loops of the user's own: `LoopTask`s as trials of a pool, or called as they are.

Read `handle` first, which is what the loop sees; then `loop_trial`, the trial, and `plain`, the reference. `registered`
makes one module and one optimizer of all that a loop registers, and `loop_thread` has the thread of a loop.
"""
