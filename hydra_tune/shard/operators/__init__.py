"""Operators in pieces, for `split_operators`: linear layers and embeddings whose weights are cut.

The package must not know plans: the modules are an ordinary model to all others. Read `operator_splitting` first, then
`operator_tree` (what is cut where) and `split_modules`, the modules themselves.
"""
