"""What is looked up instead of made anew changes no plan: those of arrays drawn at random are the ones on file."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hydra_tune.planner.cost.latency import times_of
from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.lowering import lowered
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from tests.unit.planner.hand import array, op

GOLDEN = Path(__file__).parents[2] / "golden" / "plans.txt"
POLICIES = {
    "paper": AllowedPlanActions(),
    "swaps": AllowedPlanActions(recomputes=False),
    "recomputations": AllowedPlanActions(swaps=False),
    "alone": AllowedPlanActions(interleaves=False),
}


def drawn(seed):
    """A forward of operators that read one or two of the last six, and a backward that reads them in reverse order."""
    draw = random.Random(seed)
    names = [f"z{i}" for i in range(40)]
    forward = [
        op(
            name,
            reads=draw.sample(names[max(0, i - 6) : i], min(i, draw.choice((1, 1, 2)))),
            seconds=draw.randint(1, 9),
        )
        for i, name in enumerate(names)
    ]
    backward = [op(f"g{i}", reads=[names[i]], seconds=draw.randint(1, 9)) for i in reversed(range(40))]
    backward += [op("update", reads=draw.sample(names, 3))]
    sizes = {name: draw.choice((0, 4, 8, 64)) for name in names} | {f"g{i}": 2 for i in range(40)}
    copies = {name: draw.randint(1, 20) for name in names}
    made = array(forward, backward, sizes, copy=copies, static=7)
    return replace(made, out_seconds={name: float(seconds) for name, seconds in copies.items()})


def told(schedule, decided):
    lines = [f"  {one.side} {one.name} {one.case} {one.seconds:g}" for one in decided]
    for one in schedule.decisions:
        lines.append(f"  back {sorted(one.swaps.items())} slots {sorted(one.slots.items())}")
        lines.append(f"  again {sorted((name, sorted(other.ops)) for name, other in one.recomputes.items())}")
    return [*lines, f"  {times_of(schedule, is_duplex=False).seconds:g} s, {peak_of(schedule)[1].peak_bytes} bytes"]


def plans():
    for seed in (1, 2):
        pair = (drawn(seed), drawn(seed + 10))
        most = peak_of(undecided(pair, 1 << 60))[1].peak_bytes
        for share in (0.7, 0.4):
            for name, policy in POLICIES.items():
                schedule, decided = planned(undecided(pair, int(most * share)), policy)
                yield f"seed {seed}, {share} of {most} bytes, {name}", schedule, decided


def test_plans_are_the_ones_on_file():
    found = [line for title, *plan in plans() for line in (title, *told(*plan))]
    assert found == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize("share", [0.4, 0.3])
def test_instructions_that_were_made_for_other_schedules_are_those_made_anew(share):
    pair = (drawn(3), drawn(4))
    schedule, _ = planned(undecided(pair, int(peak_of(undecided(pair, 1 << 60))[1].peak_bytes * share)))
    assert any(one.recomputes for one in schedule.decisions)
    assert any(one.swaps for one in schedule.decisions)
    anew = replace(schedule, arrays=tuple(replace(one) for one in schedule.arrays))
    for segment in (*schedule.segments, *schedule.ends):
        assert lowered(schedule, segment) == lowered(anew, segment)
