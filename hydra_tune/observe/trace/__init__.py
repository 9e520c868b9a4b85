"""A run's log as traces, pictures and tables.

Apart from `turns`, the package must read logs only, never a running pool. Read `chrome_trace` first (rows for Perfetto) with
`chrome_events`, then `run_plot` with `gantt`, and `run_table`; `turns` notes a worker's memory actions while a run is
recorded.
"""
