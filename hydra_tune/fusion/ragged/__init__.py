"""Members that differ from each other in their losses, or in the sizes of their batches.

The package must not know groups: a graph and a number of rows go in, a graph comes out. Read `loss_heads` and
`multi_head_graph` first (one beginning, a loss for each member), then `masked_loss`, `sample_independence` and
`sample_rules`, which say when a small batch may be computed as part of a larger one.
"""
