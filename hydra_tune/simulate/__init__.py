"""Schedules on a virtual clock: the same state machine, and what to compare it with."""
