"""Displays, tables, event logs and timelines of pools and sweeps.

The package must hold no part of the engine: plain snapshots, names, numbers and times come in. Read `event_log` (what a
pool writes and reads back), then `live` (views of a sweep) and `trace` (timelines of a log). Pools, the `hydra-tune`
commands, `memory`, `simulate` and `integrations/hydra_tune_optuna/study_reader.py` use the package.
"""

import random

# Rich draws from Python's random numbers when it is imported. A script that has seeded them before must not notice. No pool
# runs yet: each one imports this package first.
_STATE = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_STATE)
del _STATE
