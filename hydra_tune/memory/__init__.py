"""The places of all bytes of all trials: blocks, the ledger of each device, and the pager that loads and spills.

The package knows devices, and must not know models or steps: units and trials are owners of bytes. Read `block_states`
and `block` first, then `ledger`, `pager` (the pager's notes explain locks and copies), `lease` and `prefetch`. `host`
keeps the host copies, `shared` has tensors of several trials at once, `activation_offload` spills tensors saved by
autograd, and `pressure` recognizes out-of-memory errors. `block_release` drops blocks and brings blocks home,
`deferred_free` keeps memory that is still being read, `trial_context` names the owner of bytes, `link_meter` times
copies, `reuse_distance` predicts uses, and `device_loss` gives up a lost device's blocks.
"""
