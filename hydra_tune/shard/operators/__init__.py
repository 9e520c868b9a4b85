"""Operators in pieces, for `split_operators`: linear layers and embeddings whose weights are cut.

The package must not know plans. To all other packages, a model with split modules is an ordinary model; only the remedies
in messages of `shard/partition/partitioner.py` name the split classes. Read
`operator_splitting` first, then `operator_tree` (the choice of operators and cuts) and `split_modules` (the modules in
pieces).
"""
