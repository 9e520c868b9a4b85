"""A pool in a process under a supervisor, which restarts the pool after a crash.

`supervisor` starts and restarts the process, and `marks` tells the supervisor which trials were at work. The package must
not import torch, and knows trials by their names alone.
"""
