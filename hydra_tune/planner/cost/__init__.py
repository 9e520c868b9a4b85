"""Predictions of a plan: the bytes on the device at each instruction, and the seconds that a segment takes.

The predictions are pure functions of a schedule, and must not know their callers. Read `peak_memory` (Algorithm G)
first, then `latency`, which adds up operators and their waits for copies.
"""
