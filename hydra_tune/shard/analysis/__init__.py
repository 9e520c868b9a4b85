"""Analyses of a captured graph: the tensors that each node makes, keeps alive and overwrites, and its random draws.

The package must not cut a graph: `partition` does. Read `graph_analysis` first, then `random_ops` and `rng_consumption`
(the random operators that move the generator by the same distance at each run) and `mutating_ops`. `module_mutation`
refuses user code that adds, removes or replaces parameters or buffers.
"""
