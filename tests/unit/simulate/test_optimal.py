"""The optimum by CP-SAT, by the mended MILP and by trying everything."""

import dataclasses
import importlib
import itertools
import random

import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import makespan_bound
from hydra_tune.simulate.optimal import BestSchedule, UnitPlacement, optimal_schedule
from tests.support.milp import milp_schedule
from tests.support.schedule_checker import faults
from tests.support.tiny_schedules import best_makespan

pywraplp = pytest.importorskip("ortools.linear_solver.pywraplp")

SOLVERS = [optimal_schedule, milp_schedule]


def tiny_chains(rng):
    return {f"job{i}": [float(rng.randint(1, 6)) for _ in range(rng.randint(1, 3))] for i in range(rng.randint(1, 3))}


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 25))])
def test_both_find_what_trying_everything_finds(seed):
    rng = random.Random(seed)
    chains, num_devices = tiny_chains(rng), rng.randint(1, 3)
    best = float(best_makespan([list(map(int, chain)) for chain in chains.values()], [1] * num_devices))
    for solve in SOLVERS:
        schedule = solve(chains, num_devices)
        assert faults(schedule.placements, chains, num_devices) == []
        assert schedule.makespan_seconds == max(placement.end_seconds for placement in schedule.placements) == best
        assert schedule.bound_seconds == pytest.approx(best)
        assert schedule.status == "optimal"
        assert schedule.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("solve", SOLVERS)
def test_an_optimum_above_the_bound_is_proven(solve):
    """Three units of 2 on two devices: 4, and no bound of total work (3) or longest chain (2) says so."""
    schedule = solve({"a": [2.0], "b": [2.0], "c": [2.0]}, 2)
    assert (schedule.makespan_seconds, schedule.status) == (4.0, "optimal")
    assert schedule.bound_seconds == pytest.approx(4.0)


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 3, 1e-9, 1e9])
def test_better_than_the_longest_first(scale):
    """Taking the longest first gives 7; the optimum keeps both devices busy to the end. In any unit of time."""
    chains = {name: [length * scale] for name, length in {"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}.items()}
    schedule = optimal_schedule(chains, 2)
    assert schedule.makespan_seconds == pytest.approx(6 * scale)
    assert schedule.status == "optimal"


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_hundreds_of_units(num_devices):
    rng = random.Random(num_devices)
    chains = {f"job{i}": [rng.uniform(0.5, 2.0) for _ in range(rng.randint(20, 60))] for i in range(6)}
    schedule = optimal_schedule(chains, num_devices, time_limit_seconds=2)
    bound = makespan_bound(map(sum, chains.values()), num_devices)
    assert faults(schedule.placements, chains, num_devices) == []
    assert bound * (1 - 1e-9) <= schedule.bound_seconds <= schedule.makespan_seconds <= bound + 2.0
    assert schedule.gap == 1 - schedule.bound_seconds / schedule.makespan_seconds


def test_time_that_is_too_short_gives_the_schedule_it_started_from():
    rng = random.Random(0)
    chains = {f"job{i}": [rng.uniform(0.5, 2.0) for _ in range(60)] for i in range(9)}
    schedule = optimal_schedule(chains, 4, time_limit_seconds=1e-6)
    bound = makespan_bound(map(sum, chains.values()), 4)
    assert faults(schedule.placements, chains, 4) == []
    assert schedule.status == "feasible"
    assert 0 < schedule.gap < 0.1
    assert schedule.bound_seconds == pytest.approx(bound)


@pytest.mark.parametrize(
    "chains", [{"a": [1e-7, 1e6], "b": [1e6], "c": [0.1, 0.2, 0.3]}, {"a": [1 / 3] * 7, "b": [0.1]}]
)
def test_durations_that_are_no_multiples_of_each_other(chains):
    schedule = optimal_schedule(chains, 2)
    assert faults(schedule.placements, chains, 2) == []
    assert schedule.makespan_seconds == pytest.approx(makespan_bound(map(sum, chains.values()), 2))
    assert schedule.status == "optimal"


def test_the_same_every_time():
    rng = random.Random(1)
    chains = {f"job{i}": [float(rng.randint(1, 9)) for _ in range(15)] for i in range(5)}
    assert optimal_schedule(chains, 3) == optimal_schedule(chains, 3)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("chains", [{}, {"a": []}])
def test_nothing_to_do(solve, chains):
    assert solve(chains, 2) == BestSchedule(placements=(), makespan_seconds=0.0, bound_seconds=0.0)
    assert solve(chains, 2).gap == 0
    assert solve(chains, 2).status == "optimal"


@pytest.mark.parametrize("solve", SOLVERS)
def test_an_empty_chain_beside_others(solve):
    assert solve({"a": [], "b": [1.0]}, 1).makespan_seconds == 1.0


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_durations_that_cannot_be(solve, seconds):
    message = f"unit 1 of chain 'a' takes {seconds} s, expected a positive number of seconds; leave out"
    with pytest.raises(ConfigError, match=message):
        solve({"a": [1.0, seconds]}, 1)


@pytest.mark.parametrize("solve", SOLVERS)
def test_no_devices_and_no_time(solve):
    with pytest.raises(ConfigError, match="num_devices must be at least 1, not 0"):
        solve({"a": [1.0]}, 0)
    with pytest.raises(ConfigError, match="time_limit_seconds must be above 0, not 0"):
        solve({"a": [1.0]}, 1, time_limit_seconds=0)


def test_the_milp_refuses_what_it_cannot_solve():
    with pytest.raises(ConfigError, match="given 25 units and takes at most 24; use optimal_schedule"):
        milp_schedule({"a": [1.0] * 25}, 1)


@pytest.mark.parametrize("solve", SOLVERS)
def test_without_ortools_the_extra_is_named(solve, monkeypatch):
    def absent(name, *args):
        raise ModuleNotFoundError(f"No module named {name!r}", name="ortools")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(
        ConfigError, match=r"needs ortools, which is not installed: pip install 'hydra-tune\[optimal\]'"
    ):
        solve({"a": [1.0]}, 1)


GOOD = tuple(
    UnitPlacement(chain=chain, index=index, device=device, start_seconds=start, seconds=1.0)
    for chain, index, device, start in [("a", 0, 0, 0.0), ("b", 0, 1, 0.0), ("a", 1, 1, 1.0)]
)


@pytest.mark.parametrize(
    ("unit", "change", "fault"),
    [
        (2, {"start_seconds": 0.5}, "run at once"),
        (2, {"start_seconds": 0.5, "chain": "b", "index": 1}, "on device 1 at once"),
        (0, {"start_seconds": 3.0}, "out of order"),
        (2, {"device": 2}, "is on device 2"),
        (2, {"seconds": 0.5}, "takes 0.5"),
        (0, {"start_seconds": -1.0}, "starts at -1.0"),
        (2, {"index": 0}, "the units placed are"),
    ],
)
def test_the_checker_sees_each_fault(unit, change, fault):
    chains = {"a": [1.0, 1.0], "b": [1.0, 1.0]} if "chain" in change else {"a": [1.0, 1.0], "b": [1.0]}
    assert faults(GOOD, {"a": [1.0, 1.0], "b": [1.0]}, 2) == []
    changed = (*GOOD[:unit], dataclasses.replace(GOOD[unit], **change), *GOOD[unit + 1 :])
    assert any(fault in said for said in faults(changed, chains, 2))


def printed_program(chains, num_devices, *, self_pairs):
    """Constraints (a) to (f) letter by letter, a start time for each unit and device; returns the solved program."""
    solver = pywraplp.Solver.CreateSolver("SCIP")
    large = 10 * sum(map(sum, chains))
    units = [(t, j) for t, chain in enumerate(chains) for j in range(len(chain))]
    makespan = solver.NumVar(0, large, "C")
    starts = {(t, p, j): solver.NumVar(0, large, f"X{t},{p},{j}") for t, j in units for p in range(num_devices)}
    for (t, j), p in itertools.product(units, range(num_devices)):
        for p_before in range(num_devices if j else 0):
            solver.Add(starts[t, p, j] >= starts[t, p_before, j - 1] + chains[t][j - 1])
        solver.Add(makespan >= starts[t, p, j] + chains[t][j])
        for u, i in units:
            if (u, i) == (t, j) and not self_pairs:
                continue
            before = solver.BoolVar(f"Y{p},{t},{j},{u},{i}")
            solver.Add(starts[t, p, j] >= starts[u, p, i] + chains[u][i] - large * before)
            solver.Add(starts[t, p, j] <= starts[u, p, i] - chains[t][j] + large * (1 - before))
    solver.Minimize(makespan)
    return solver, solver.Solve()


def test_why_the_printed_program_needs_mending():
    two_trials = [[1.0, 1.0], [1.0, 1.0]]
    solver, status = printed_program(two_trials, 2, self_pairs=True)
    assert status == solver.INFEASIBLE
    solver, status = printed_program(two_trials, 2, self_pairs=False)
    assert status == solver.OPTIMAL
    assert solver.Objective().Value() == pytest.approx(4.0)
    assert milp_schedule({"a": two_trials[0], "b": two_trials[1]}, 2).makespan_seconds == 2.0
