"""Horizontal fusion: trials of one architecture as one, with the members' tensors stacked along a dimension in front.

Note: what a group is. A plan of the architecture is made for one member, as ever. The group runs the same shards in the same
order on tensors of the same names, each with one more dimension in front, of size N: parameters, buffers, batches, values that
cross cuts, gradients, optimizer state (`stacking.py`, `plan.py`). Whatever holds and moves a trial's tensors holds and moves
the group's.

Note: what stays apart. Each member has its own random generator, from which its numbers are drawn one member after the other
(`drawing.py`), so that what one draws depends on its seed alone; and its own optimizer and scheduler, whose rates are read
before each step (`optimizers.py`). No operator mixes members, so that a member that has gone NaN leaves the others' bits alone.

Note: masking. A member that is not to take a step (it has ended, or its batch is of another kind) has its place in the stack
all the same. It computes on somebody else's batch, draws nothing, and what comes of it is dropped: its buffers are put back and
its parameters and optimizer state keep their values.

In float64 a member's numbers are those it has alone to about 1e-9; in float32 the algorithm is the same, and last bits are not:
products of stacked matrices are not rounded as those of single ones are.
"""
