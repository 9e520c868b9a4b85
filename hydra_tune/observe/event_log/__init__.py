"""The event log: what a pool does, one JSON object a line, written while it runs and read back.

The package must not know the engine: whoever runs tells it plain values. Read `writer` first, then `line_format` (the
lines) and `reader`; `run_figures` says what a run came to, from its log alone.
"""
