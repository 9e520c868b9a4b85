"""The live view of a sweep: on a terminal, below a notebook's cell, or as lines.

The package must hold no part of the engine: it reads snapshots of plain values. Read `snapshot` first, then `screen` (a
snapshot as lines), `terminal`, `notebook` and `plain_lines`, which draw; `summary` reports the finished
sweep. `ticker`, `paint`, `rows`, `text`, `sparkline` and `printed` are their parts.
"""
