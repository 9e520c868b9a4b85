"""Display of a running pool and a sweep; the package reads plain snapshots and holds no part of the engine."""

import random

# Rich draws from Python's random numbers when it is imported. A script that has seeded them before must not notice. No pool
# runs yet: each one imports this package first.
_STATE = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_STATE)
del _STATE
