"""A captured graph on stacked members: each operator as one call for all of them.

The package must not know trials, groups or devices. Read `batched_graph` first, the interpreter, then `batching_rules`
and its parts (`conv_rules`, `embedding_rules`, `rnn_rules`); `per_member_fallback` runs what has no batched form,
`random_decomposition` takes random operators apart, and `subgraph` cuts a graph.
"""
