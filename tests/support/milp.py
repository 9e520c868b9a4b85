"""HYDRA's scheduling problem as the paper's mixed-integer program, repaired. For tiny instances.

The program orders every pair of units of different chains, so its size grows with the square of the number of units.
The solver serves to check `optimal_schedule`, not to replace it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.bound import makespan_bound
from hydra_tune.simulate.optimal import BestSchedule, UnitPlacement, check_chains, import_ortools

_MAX_UNITS = 24
"""Most units: two dozen units on two devices already take minutes of search."""


def milp_schedule(
    chains: Mapping[str, Sequence[float]], num_devices: int, *, time_limit_seconds: float = 60.0
) -> BestSchedule:
    """Schedule chains of units on identical devices for the least makespan, by HYDRA's MILP and the solver SCIP.

    Args:
        chains: for each chain, the durations of its units in seconds, in order; at most 24 units in all.
        num_devices: devices, at least 1.
        time_limit_seconds: time after which the solver returns its best schedule so far.

    Returns:
        The schedule, with the solver's proven bound.

    Raises:
        ConfigError: a duration that is not a positive number, fewer than 1 device, too many units, no schedule found in
            the time given; or ortools is not installed.

    Source:
        HYDRA (Nagrecha and Kumar), section 5.3.1, constraints (a) to (f), notation of Table 1: X start times, S
        durations, Y the order of two units, U a large number, C the makespan.

    Differs:
        As printed the program has no solution. With only the first of these repairs every unit occupies every device,
        so two trials of two units on two devices take 4 units of time where 2 are enough.
        * No unit is ordered before or after itself: for i-j = i'-j', (b) demands Y = 1 and (c) Y = 0.
        * An assignment variable A: each unit is on exactly one device, and (b) and (c) bind two units only where both
          are on the same device.
        * One start time per unit: with A, a unit's start times on other devices mean nothing.
        * One order Y per pair of units, not one per device and direction, and none for units of the same chain, already
          ordered by (a).
    """
    check_chains(chains, num_devices)
    if not time_limit_seconds > 0:
        raise ConfigError(f"time_limit_seconds must be above 0, not {time_limit_seconds}")
    num_units = sum(map(len, chains.values()))
    if num_units > _MAX_UNITS:
        raise ConfigError(
            f"the MILP was given {num_units} units and takes at most {_MAX_UNITS}; use optimal_schedule, which has no limit"
        )
    pywraplp = import_ortools("ortools.linear_solver.pywraplp")
    if not num_units:
        return BestSchedule(placements=(), makespan_seconds=0.0, bound_seconds=0.0)
    solver = pywraplp.Solver.CreateSolver("SCIP")
    program = _MilpScheduleVariables.of(solver, chains, num_devices)
    solver.SetTimeLimit(math.ceil(1000 * time_limit_seconds))
    status = solver.Solve()
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        raise ConfigError(
            f"the MILP of {num_units} units found no schedule in {time_limit_seconds} s; raise time_limit_seconds or use "
            "optimal_schedule"
        )
    placements = program.placements(chains)
    makespan = max(placement.end_seconds for placement in placements)
    # The solver's bound may exceed the makespan by its tolerance, because the makespan is timed anew.
    bound = max(solver.Objective().BestBound(), makespan_bound(map(math.fsum, chains.values()), num_devices))
    return BestSchedule(placements=placements, makespan_seconds=makespan, bound_seconds=min(bound, makespan))


@dataclass(frozen=True, slots=True)
class _MilpScheduleVariables:
    """The variables of the program that give the schedule.

    Args:
        starts: X, for each unit.
        assigned: A, for each unit and device.
    """

    starts: Mapping[tuple[str, int], Any]
    assigned: Mapping[tuple[str, int], Sequence[Any]]

    @classmethod
    def of(cls, solver: Any, chains: Mapping[str, Sequence[float]], num_devices: int) -> "_MilpScheduleVariables":
        """State the whole program; letters are the paper's."""
        large = math.fsum(seconds for chain in chains.values() for seconds in chain)  # U: no schedule need be longer
        units = [(name, index) for name, chain in chains.items() for index in range(len(chain))]
        makespan = solver.NumVar(0, large, "C")
        starts = {unit: solver.NumVar(0, large, f"X{unit}") for unit in units}  # (d)
        assigned = {unit: [solver.BoolVar(f"A{unit}{p}") for p in range(num_devices)] for unit in units}
        for (name, index), start in starts.items():
            solver.Add(sum(assigned[name, index]) == 1)
            if index:
                solver.Add(start >= starts[name, index - 1] + chains[name][index - 1])  # (a)
            solver.Add(makespan >= start + chains[name][index])  # (e), (f)
        for unit, other in itertools.combinations(units, 2):
            if unit[0] == other[0]:
                continue
            seconds, other_seconds = chains[unit[0]][unit[1]], chains[other[0]][other[1]]
            before = solver.BoolVar(f"Y{unit}{other}")
            for on_device, other_on_device in zip(assigned[unit], assigned[other], strict=True):
                apart = large * (2 - on_device - other_on_device)  # 0 where both are on this device
                solver.Add(starts[unit] >= starts[other] + other_seconds - large * before - apart)  # (b)
                solver.Add(starts[unit] <= starts[other] - seconds + large * (1 - before) + apart)  # (c)
        solver.Minimize(makespan)
        return cls(starts, assigned)

    def placements(self, chains: Mapping[str, Sequence[float]]) -> tuple[UnitPlacement, ...]:
        """Placements of the solution, by start; timed anew, because the solver meets constraints within a tolerance."""
        device_free: dict[int, float] = {}
        chain_free: dict[str, float] = {}
        placements_in_order = []
        # The solver's values of binary variables are only near 0 or 1, hence `round`.
        for name, index in sorted(self.starts, key=lambda unit: self.starts[unit].solution_value()):
            device = next(
                p for p, on_device in enumerate(self.assigned[name, index]) if round(on_device.solution_value())
            )
            start = max(device_free.get(device, 0.0), chain_free.get(name, 0.0))
            seconds = chains[name][index]
            placements_in_order.append(
                UnitPlacement(chain=name, index=index, device=device, start_seconds=start, seconds=seconds)
            )
            device_free[device] = chain_free[name] = start + seconds
        return tuple(sorted(placements_in_order, key=lambda placement: (placement.start_seconds, placement.device)))
