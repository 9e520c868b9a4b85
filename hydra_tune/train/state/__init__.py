"""A trial's long-lived tensors: parameters, buffers and optimizer state, as blocks that the pager moves.

The package must not know the order of units. Read `tensor_groups` first (a trial's tensors in blocks), then
`model_state` (the optimizer's steps and state) and `block_store` (a step's values). `shared_state` has the parameters of a
base shared by trials, `replicas` are copies for devices side by side, `host_optimizer` runs updates on the host, and
`host_quota` reserves a trial's host memory.
"""
