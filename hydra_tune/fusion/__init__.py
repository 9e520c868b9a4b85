"""Horizontal fusion: train several trials of the same architecture as a single trial on stacked tensors.

`pool/fusion/` forms groups of a pool's jobs, and `pool/dry_run/` forecasts groups. `PlanLibrary`
(`shard/partition/plan_cache.py`) makes a plan of the architecture for a single member, as for any trial. A fused group
runs the same shards in the same order, on tensors of the same names with an extra leading dimension of size N:
parameters, buffers, batches, values that cross cuts, gradients and optimizer state
(`fusion/batching/batched_graph.py`, `fusion/compile/batched_plan.py`). Paging, spilling and scheduling therefore treat a
group like any other trial. Fusion pays for small models, where launching operators costs more than the arithmetic.

Note: slots. Every member occupies a slot, an index along the leading dimension. A slot can also be vacant.

Note: state of each member. Every member draws random numbers from its own generator (`batched/batched_random.py`), and
keeps its own optimizer and scheduler, of which the group reads the rates before each step
(`batched/batched_optimizer.py`). No operator may mix members: a member that turns NaN must leave the bits of the others
unchanged.

Note: masking. A member that does not take part in a step (the member has ended, or wants another kind of batch) keeps
its slot in the stack. The slot computes on another member's batch and draws nothing, and the group drops the results:
buffers are restored, and parameters and optimizer state keep their values.

In float32 the last bits differ from an unfused run, because batched matrix products round differently from single
products.

The package must not choose devices or the order of units: the pool runs a group like a trial. Read `group` first, then
`batching` and `compile` (a member's plan for all members), `matching` (the trials that may form a group), `ragged`
(members that differ in losses or batch sizes) and `runtime` (groups whose steps need a plan).
"""
