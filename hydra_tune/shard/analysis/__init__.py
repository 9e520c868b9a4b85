"""Analyses of a captured graph: what each node makes, keeps alive, overwrites and draws.

The package must not cut: `partition` does. Read `graph_analysis` first, then `random_ops` and `rng_consumption` (how
far random operators move the generator), `mutating_ops`, and `module_mutation`, which refuses by name what user code
may not do.
"""
