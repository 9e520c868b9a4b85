"""The passes that decide on a step's swaps and recomputations (algorithms B to F), and the graph rewriter.

A pass takes a schedule and returns another schedule: a pass must not run a step or read a clock. Read `swap_recompute`
first, the loop of Algorithm B, then `candidates` (F), `swap_overhead` (C) and `recompute_updates` (E). Algorithm D is
the candidate's `total_seconds`. `Planner` (`planner/search/portfolio.py`) runs the passes. `double_swap` and `min_cut`
are passes of our own, and `graph_rewrite` turns a schedule into merged graphs.
"""
