"""Checkpoints of trials while other trials run: the times of the saves, and the thread that writes.

The package must not know the format: `hydra_tune.checkpoint` does. Read `writer` first, then `lookup` (checkpoints of
earlier processes) and `suspend`, which saves and ends all jobs at once.
"""
