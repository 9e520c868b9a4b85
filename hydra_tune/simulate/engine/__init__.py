"""The scheduler's state machine on a virtual clock.

The package must not read a clock or a recording. Read `simulator` first, then `entities` (trials and devices as they
are now) and `transfers` (bytes on their way); `lookahead` sends ahead, `repeats` skips what repeats exactly, and `grid`
keeps times exact.
"""
