"""Predictions of a plan: the bytes on the device at each instruction, and the seconds that a segment takes.

The passes simulate schedules here while they decide, and `planner/search/portfolio.py` times each finished plan. The
predictions are pure functions of a schedule, and must not know their callers. Read `peak_memory` (Algorithm G) first,
then `latency`, which adds up operators and their waits for copies.
"""
