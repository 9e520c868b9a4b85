"""From a model and its step to shards: capture, cut, pilot, and the arithmetic of one shard unit.

Nothing here knows of trials over time, of where bytes live, or of the schedule.
"""
