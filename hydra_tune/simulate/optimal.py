"""Optimal schedules of chains of units on identical devices, as the yardstick for policies.

`hydra-tune simulate --optimum` (`cli/commands/simulate.py`) calls `import_ortools` before the simulation, to refuse a missing
solver, and `optimal_schedule` after the simulation; `benchmarks/schedule.py` calls `optimal_schedule`, too. The module knows
durations only: no transfers, no policy, no scheduler. The solver needs `ortools`, an extra imported at the first call.
"""

import heapq
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hydra_tune.errors import ConfigError
from hydra_tune.schedule.bound import makespan_bound

SOLVER = "ortools.sat.python.cp_model"
"""Module of the solver."""

_MAX_TICKS = 2**40
"""Total work in ticks: small enough for the solver's sums not to overflow, large enough for times to resolve microseconds."""

_SAME = 1e-6
"""Relative difference below which a makespan meets its bound: above the rounding of ten thousands of units to ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlacement:
    """One unit in a schedule; `index` is its place in its chain, from 0, and `device` the device's number, from 0."""

    chain: str
    index: int
    device: int
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """End of the unit, in seconds."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSchedule:
    """A schedule, with a proven bound on its quality.

    Args:
        placements: every unit, by start.
        makespan_seconds: end of the last unit; 0 without units.
        bound_seconds: lower bound on every schedule's makespan: the larger of `makespan_bound` and the solver's proof.
    """

    placements: tuple[UnitPlacement, ...]
    makespan_seconds: float
    bound_seconds: float

    @property
    def gap(self) -> float:
        """Largest possible share by which the optimum is shorter than the makespan."""
        return 1 - self.bound_seconds / self.makespan_seconds if self.makespan_seconds else 0.0

    @property
    def status(self) -> str:
        """`"optimal"`: proven, to a millionth. `"feasible"`: the best schedule found in the given time."""
        return "optimal" if self.gap <= _SAME else "feasible"


def optimal_schedule(
    chains: Mapping[str, Sequence[float]], num_devices: int, *, time_limit_seconds: float = 60.0
) -> BestSchedule:
    """Schedule chains of units on identical devices for the least makespan; one unit of a chain at a time.

    Each unit is an interval of fixed length; one cumulative constraint of `num_devices` covers all intervals, and each
    chain is a sequence of precedences. The device of a unit is no variable, because all free devices are equally good.
    The solver starts from a longest-remaining-time-first schedule, and uses one thread and a fixed seed.

    Args:
        chains: for each chain, the durations of its units in seconds, in order.
        num_devices: devices, at least 1.
        time_limit_seconds: time after which the solver returns its best schedule so far. Building the model comes on
            top.

    Returns:
        The schedule, at worst the solver's start.

    Raises:
        ConfigError: a duration that is not a positive number, fewer than 1 device, no time at all; or ortools is not
            installed.

    Source:
        HYDRA (Nagrecha and Kumar), section 5.3.1, states the problem, as a MILP (`tests/support/milp.py`).

    Differs:
        A constraint program: the MILP orders every pair of units on every device, and takes minutes for two dozen
        units. The search ends within a millionth of the bound. The solver uses durations in whole ticks: of a tick that
        divides all durations, or else rounded down to a tick finer than a millionth of a millionth of the total. The
        found schedule is then timed with exact durations, and the bound stays a bound.
    """
    check_chains(chains, num_devices)
    if not time_limit_seconds > 0:
        raise ConfigError(f"time_limit_seconds must be above 0, not {time_limit_seconds}")
    cp_model = import_ortools(SOLVER)
    tick = _tick_seconds([seconds for chain in chains.values() for seconds in chain])
    lengths = {name: [int(Fraction(seconds) / tick) for seconds in chain] for name, chain in chains.items()}
    hint = _longest_remaining_first(lengths, num_devices)
    bound = makespan_bound(map(math.fsum, chains.values()), num_devices)
    if not hint:
        return BestSchedule(placements=(), makespan_seconds=0.0, bound_seconds=0.0)
    starts, proven_ticks = _solve(cp_model, lengths, num_devices, hint, time_limit_seconds)
    placements = timed(chains, num_devices, starts)
    makespan = max(placement.end_seconds for placement in placements)
    bound = min(
        max(bound, float(proven_ticks * tick)), makespan
    )  # rounding must not lift the bound above a real schedule
    return BestSchedule(placements=placements, makespan_seconds=makespan, bound_seconds=bound)


def check_chains(chains: Mapping[str, Sequence[float]], num_devices: int) -> None:
    """Raise `ConfigError` for a duration that is not a positive number, or fewer than 1 device."""
    if num_devices < 1:
        raise ConfigError(f"num_devices must be at least 1, not {num_devices}")
    for name, chain in chains.items():
        for index, seconds in enumerate(chain):
            if not 0 < seconds < math.inf:
                raise ConfigError(
                    f"unit {index} of chain {name!r} takes {seconds} s, expected a positive number of seconds; "
                    "leave out units that take no time"
                )


def import_ortools(module: str) -> Any:
    """Import a module of ortools, an optional extra.

    Raises:
        ConfigError: ortools is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Another missing module is a broken installation of ortools: its own error tells more.
        if not (error.name or "").startswith("ortools"):
            raise
        raise ConfigError(
            "the optimum needs ortools, which is not installed: pip install 'hydra-tune[optimal]'"
        ) from error


def timed(
    chains: Mapping[str, Sequence[float]], num_devices: int, order: Mapping[tuple[str, int], float]
) -> tuple[UnitPlacement, ...]:
    """Start every unit as early as possible, one after the other in a given order.

    With the order of starts of some schedule, no unit starts later than in the schedule: at the unit's turn, at most
    `num_devices - 1` of the earlier units are still running, so the device that is free first is free in time.

    `order` has a number for each chain and index: lower numbers come first, and at ties the unit earlier in its chain. The
    units are returned by start.
    """
    devices = [(0.0, device) for device in range(num_devices)]
    chain_free = dict.fromkeys(chains, 0.0)
    placements = []
    for name, index in sorted(order, key=lambda unit: (order[unit], unit[1])):
        free, device = heapq.heappop(devices)
        placement = UnitPlacement(
            chain=name,
            index=index,
            device=device,
            start_seconds=max(free, chain_free[name]),
            seconds=chains[name][index],
        )
        placements.append(placement)
        chain_free[name] = placement.end_seconds
        heapq.heappush(devices, (placement.end_seconds, device))
    return tuple(sorted(placements, key=lambda placement: (placement.start_seconds, placement.device)))


def _tick_seconds(durations: Sequence[float]) -> Fraction:
    """Longest tick that divides every duration, or else a sufficiently fine tick."""
    # Fractions hold floats exactly, so a tick that divides every duration is found if there is one.
    exact = [Fraction(seconds) for seconds in durations]
    if not exact:
        return Fraction(1)
    denominator = math.lcm(*{seconds.denominator for seconds in exact})  # powers of two, all floats being dyadic
    common = Fraction(math.gcd(*{int(seconds * denominator) for seconds in exact}), denominator)
    return max(common, sum(exact, Fraction()) / _MAX_TICKS)


def _longest_remaining_first(lengths: Mapping[str, Sequence[int]], num_devices: int) -> dict[tuple[str, int], int]:
    """Starts, in ticks, of the schedule in which each free device takes the free chain with the most work left."""
    # Negative, because a heap has its smallest entry first.
    ready = [(-sum(chain), name) for name, chain in lengths.items() if chain]
    heapq.heapify(ready)
    done = dict.fromkeys(lengths, 0)
    ends: list[tuple[int, str, int]] = []
    starts: dict[tuple[str, int], int] = {}
    now = 0
    while ready or ends:
        while ready and len(ends) < num_devices:
            remaining, name = heapq.heappop(ready)
            starts[name, done[name]] = now
            length = lengths[name][done[name]]
            heapq.heappush(ends, (now + length, name, remaining + length))
        now, name, remaining = heapq.heappop(ends)
        freed = [(name, remaining)]
        # Take all units that end at this moment before choosing: the choice must see every freed chain.
        while ends and ends[0][0] == now:
            _, name, remaining = heapq.heappop(ends)
            freed.append((name, remaining))
        for name, remaining in freed:
            done[name] += 1
            if done[name] < len(lengths[name]):
                heapq.heappush(ready, (remaining, name))
    return starts


def _solve(
    cp_model: Any,
    lengths: Mapping[str, Sequence[int]],
    num_devices: int,
    hint: Mapping[tuple[str, int], int],
    time_limit_seconds: float,
) -> tuple[Mapping[tuple[str, int], int], int]:
    """Return the best starts found, in ticks, and a proven lower bound of the makespan."""
    horizon = max(start + lengths[name][index] for (name, index), start in hint.items())
    totals = [sum(chain) for chain in lengths.values()]
    # The bound of McNaughton (`makespan_bound`), rounded up to whole ticks.
    least = max(*totals, -(-sum(totals) // num_devices))
    model = cp_model.CpModel()
    makespan = model.new_int_var(least, horizon, "makespan")
    starts: dict[tuple[str, int], Any] = {}
    intervals = []
    for name, chain in lengths.items():
        before, after = 0, sum(chain)
        for index, length in enumerate(chain):
            # The units ahead and behind in the chain must fit before and after; narrow domains shorten the search.
            start = model.new_int_var(before, horizon - after, f"{name}/{index}")
            if index:
                model.add(start >= starts[name, index - 1] + chain[index - 1])
            model.add_hint(start, hint[name, index])
            intervals.append(model.new_fixed_size_interval_var(start, length, f"{name}/{index}"))
            starts[name, index] = start
            before, after = before + length, after - length
        if chain:
            model.add(makespan >= starts[name, len(chain) - 1] + chain[-1])
    model.add_cumulative(intervals, [1] * len(intervals), num_devices)
    model.add_hint(makespan, horizon)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_seconds
    # One thread and a fixed seed, so that a search that ends in time can be repeated.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # Where no duration divides another, the search for the last billionth would use up all of the time.
    solver.parameters.relative_gap_limit = _SAME / 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        assert status == cp_model.UNKNOWN, "the hint is a solution"
        return hint, least
    best_starts = {unit: solver.value(start) for unit, start in starts.items()}
    # The solver's bound is a float, while a makespan is a whole number of ticks: round up, sparing the float's error.
    return best_starts, max(least, math.ceil(solver.best_objective_bound - 0.5))
