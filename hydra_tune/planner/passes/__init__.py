"""The passes that decide what a step swaps and what it recomputes (algorithms B to F), and the graph rewriter.

A pass takes a schedule and gives another one: it must not run a step or read a clock. Read `swap_recompute` first, the
loop of Algorithm B, then `candidates` (F), `swap_overhead` (C), `recompute_overhead` (D) and `recompute_updates` (E);
`double_swap` and `min_cut` are passes of our own, `memory_lower_bound` says what no plan can be below, and
`graph_rewrite` brings a schedule into merged graphs.
"""
