"""The pools' side of the Ray integration: the actors on each node, and the trials in training.

The package must not import Ray Tune: trials and drivers do. Read `node_pool` first, the pool of one node, then
`trial_leases` (the trials here, until when) and `pool_runtime`. `pool_directory` knows all pools, `heartbeat` reports to
the directory, `balance` with `remaining_time` chooses the place of each trial, and `local_socket` is the short way from a
trial's process. `actors` makes and finds the actors, and `nodes` finds the nodes. Only `node_pool`, `pool_runtime` and
`trial_leases` may import torch.
"""
