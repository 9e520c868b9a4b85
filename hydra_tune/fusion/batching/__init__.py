"""A captured graph on stacked members: each operator as a single call for all members.

The package must not know trials, groups or pools. Read `batched_graph` first, the interpreter, then `batching_rules`
and its parts (`conv_rules`, `embedding_rules`, `rnn_rules`); `per_member_fallback` runs operators without a batched
form, `stacked_autocast` casts operands in mixed precision, `random_decomposition` takes random operators apart,
`aliasing_writes` finds writes whose effect depends on the layout, and `subgraph` cuts a graph.
"""
