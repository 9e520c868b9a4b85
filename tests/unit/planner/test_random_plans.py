"""Whatever the sub-arrays and the limit: what is planned computes the same, and needs no more memory than it says."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.planner.cost.peak_memory import peak_of, simulated
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from tests.unit.planner.hand import array, op
from tests.unit.planner.machine import Machine, alone

POLICIES = [
    AllowedPlanActions(),
    AllowedPlanActions(swaps=False),
    AllowedPlanActions(recomputes=False),
    AllowedPlanActions(interleaves=False),
    AllowedPlanActions(is_duplex=False),
]


def random_array(random, name="random"):
    """Operators that read, overwrite and draw at random, running statistics, workspace, and updates of parameters.

    Some clip: behind the norm of all gradients each of these updates something."""
    forward, backward, sizes, copy = [], [], {}, {}
    storages = []
    for rank in range(random.randint(1, 9)):
        made = f"z{rank}"
        reads = [*random.sample(storages, min(len(storages), random.randint(0, 2))), *random.sample(["w0", "w1"], 1)]
        kind = random.random()
        if kind < 0.15 and storages:
            target = random.choice(storages)
            forward.append(op(f"{made}_", reads=[*reads, target], makes=(), writes=[target], seconds=random.random()))
            continue
        statistics = ["mean"] if kind > 0.85 else []
        makes = (made, f"{made}.1") if kind > 0.7 else (made,)
        forward.append(
            op(made, reads=[*reads, *statistics], makes=makes, writes=statistics, repeated=statistics,
               seconds=random.random(), workspace=random.choice([0, 0, 3]), is_random=0.15 <= kind < 0.25)
        )  # fmt: skip
        storages += makes
        for one in makes:
            sizes[one] = random.randint(1, 10)
            if random.random() < 0.9:
                copy[one] = random.choice([0.0, 0.3, 1.0, 4.0])
    forward.append(op("loss", reads=storages[-1:] or ["w0"]))
    gradients = ["loss"]
    left = list(reversed(storages)) if random.random() < 0.5 else random.sample(storages, len(storages))
    for rank, one in enumerate([one for one in left if random.random() < 0.8]):
        made, reads = f"g{rank}", [one, gradients[-1], *random.sample(storages, random.randint(0, 1))]
        backward.append(op(made, reads=reads, seconds=random.random(), workspace=random.choice([0, 0, 5])))
        sizes[made] = random.randint(0, 5)
        gradients.append(made)
        if random.random() < 0.3:
            backward.append(op(f"u{rank}", reads=["w1", made], makes=(), writes=["w1"], seconds=0.1))
        if random.random() < 0.1:
            backward.append(op(f"o{rank}", reads=[one], makes=(), writes=[one], seconds=0.1))
    if random.random() < 0.3:
        backward.append(op("norm", reads=gradients[1:]))
        backward += [op(f"c{one}", reads=["norm", one, "w1"], makes=(), writes=["w1"]) for one in gradients[1:]]
    backward.append(op("end", reads=[gradients[-1], "w0"], makes=(), writes=["w0"]))
    return array(forward, backward, sizes, copy=copy, results=["loss"], name=name, static=random.randint(0, 5))


def check(seed):
    random = Random(seed)
    arrays = tuple(random_array(random) for _ in range(random.randint(1, 2)))
    whole = undecided(arrays, 1 << 60)
    rest = peak_of(whole)[1].peak_bytes - whole.static_bytes
    limit = whole.static_bytes + int(rest * random.uniform(0.2, 1.0))
    schedule, decided = planned(undecided(arrays, limit), random.choice(POLICIES))
    verify_schedule(schedule)
    machine = Machine(schedule)
    steps = 3
    if len(arrays) == 1:
        order = [ScheduleSegment(None, 0), ScheduleSegment(0, None)] * steps
    else:
        order = [
            ScheduleSegment(None, 0),
            *[ScheduleSegment(0, 1), ScheduleSegment(1, 0)] * (steps - 1),
            ScheduleSegment(0, 1),
            ScheduleSegment(1, None),
        ]
    for segment in order:
        machine.run(segment)
    for side, one in enumerate(arrays):
        operators, parameters = alone(one, side, steps)
        assert machine.seen[side] == operators
        assert {key: value for key, value in machine.parameters.items() if key[0] == side} == parameters
    for segment, peak in machine.peaks.items():
        assert peak <= simulated(schedule, segment).peak_bytes + left_over(machine, arrays)
    fits = peak_of(schedule)[1].peak_bytes <= limit
    return fits, len(decided), machine


def left_over(machine, arrays):
    """Losses stay on the machine's device, and are not in the simulator's segments after their own."""
    return sum(a.sizes["loss"] for a in arrays)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1 << 30))
def test_plans_of_random_steps_compute_the_same_within_their_memory(seed):
    check(seed)
