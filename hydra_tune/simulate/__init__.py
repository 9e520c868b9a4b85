"""The scheduler on a virtual clock: simulates a sweep on devices that need not exist.

`simulate` plays a `Scenario` with the very state machine that drives the real pool; the package must not import the
pool, torch or numpy. `hydra-tune simulate` (`cli/commands/simulate.py`) and people's programs call `simulate`. Read `model`
first (the input), then `engine` (the simulation) and `outcome` (the result). `profile` and `workload` make inputs, `table`
and `plot` show results, `optimal` computes the best schedule, and `recorded` plays a real run again.
"""

from hydra_tune.simulate.engine.lookahead import Lookahead
from hydra_tune.simulate.engine.simulator import simulate
from hydra_tune.simulate.model import Outage, Scenario, SimulatedDevice, SimulatedTrial, Slowdown, training_step
from hydra_tune.simulate.outcome import DeviceOutcome, Interval, SimulationResult

__all__ = [
    "DeviceOutcome",
    "Interval",
    "Lookahead",
    "Outage",
    "Scenario",
    "SimulatedDevice",
    "SimulatedTrial",
    "SimulationResult",
    "Slowdown",
    "simulate",
    "training_step",
]
