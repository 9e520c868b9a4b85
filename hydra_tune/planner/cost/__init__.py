"""Predictions of a plan: the bytes on the device at each instruction, and the seconds that a segment takes.

They are pure functions of a schedule, and must not know who asks. Read `peak_memory` (Algorithm G) first, then
`latency`, which adds operators up one after the other, with copies beside them.
"""
