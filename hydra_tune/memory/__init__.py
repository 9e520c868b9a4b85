"""The places of all bytes of all trials: blocks, the ledger of each device, and the pager that loads and spills.

The package knows devices, and must not know models or steps: units and trials are owners of bytes. Read `block_states`
and `block` first, then `ledger`, `pager` (its notes explain locks and copies), `lease` and `prefetch`. `host` keeps the
host copies, `shared` has tensors of several trials at once, `activation_offload` spills what autograd saves,
and `pressure` recognizes out-of-memory errors.
"""
