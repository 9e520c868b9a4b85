"""The arithmetic of several members' tensors, stacked along a dimension in front, which `fusion` and `planner` share.

The package must not know groups, trials or plans: `fusion` and `planner` import this package, and this package imports
neither. Read `flat_tensors` and `hyperparameters` first, then `update_kernels` and `batched_optimizer`, which are an
optimizer's step for all members at once, and `per_member_optimizer`, which steps each member's own; `batched_random`
draws each member's numbers from that member's generator; `joint_graph` traces a step as one flat graph, which
`graph_cleanup` shortens.
"""
