"""The event log: the actions of a pool, one JSON object a line, written during the run and read back.

The package must not know the engine, which hands over plain values. Read `writer` first, then `line_format` (the lines)
and `reader`; `run_figures` computes a run's figures from its log alone, and `run_state` says how far a run has come.
"""
