"""What every policy must satisfy. A policy that is registered is tested here; a new one needs no new test."""

import random

import pytest

from hydra_tune.schedule import POLICIES, JobView, LRTFPaper, Policy, Unit, make_policy, makespan_bound
from tests.unit.schedule.driver import drive
from tests.unit.schedule.oracles import ORACLES

DEVICES = ("cpu:0", "cpu:1")


def some_views(rng):
    orders = rng.sample(range(100), rng.randint(1, 8))
    return [
        JobView(
            job=f"job{order}",
            order=order,
            unit=Unit(kind="forward", shard=rng.randint(0, 2), seconds=1.0),
            remaining_seconds=float(rng.choice([0, 1, 2, 2, 50])),
            step_seconds=float(rng.choice([0, 1, 10])),
            shard_device=rng.choice([None, *DEVICES]),
            done_seconds=float(rng.choice([0, 1, 2, 50])),
            turn=rng.choice([0, 1, order + 2]),
            last_device=rng.choice([None, *DEVICES]),
        )
        for order in orders
    ]


def some_jobs(rng):
    return {
        f"job{index}": [
            Unit(kind="forward", shard=n % 3, seconds=float(rng.randint(1, 5))) for n in range(rng.randint(1, 9))
        ]
        for index in range(rng.randint(1, 7))
    }


@pytest.fixture(params=sorted(POLICIES))
def policy(request):
    return make_policy(request.param)


@pytest.fixture(params=range(10), ids=lambda seed: f"seed{seed}")
def rng(request):
    return random.Random(request.param)


def test_it_is_a_policy(policy):
    assert isinstance(policy, Policy)


def test_it_chooses_a_candidate_whatever_their_order(policy, rng):
    """The same jobs give the same choice: nothing hangs on the order in which they became eligible."""
    for _ in range(20):
        views = some_views(rng)
        chosen = policy.choose(DEVICES[0], tuple(views))
        assert any(chosen is view for view in views)
        rng.shuffle(views)
        assert policy.choose(DEVICES[0], tuple(views)) is chosen


SELECTIONS = {name: (make_policy(name), oracle) for name, oracle in ORACLES.items()} | {
    "lrtf_paper, scan": (LRTFPaper(structure="scan"), ORACLES["lrtf_paper"])
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_kept_in_order_it_chooses_as_one_look_at_every_candidate(name, rng):
    """Over a history long enough for its structures to be cleared several times."""
    policy, oracle = SELECTIONS[name]
    selection, eligible = policy.start(), {}
    for _ in range(600):
        for view in some_views(rng):
            if view.job in eligible:
                selection.remove(eligible.pop(view.job))
            if rng.random() < 0.7:
                eligible[view.job] = view
                selection.add(view)
        for device in DEVICES:
            if eligible:
                chosen = selection.choose(device)
                assert chosen is oracle(device, list(eligible.values()))
                if rng.random() < 0.5:
                    selection.remove(eligible.pop(chosen.job))


def test_one_policy_serves_several_schedulers(policy, rng):
    """What changes is in the selections, so two that hear the same choose the same."""
    views = some_views(rng)
    first, second = policy.start(), policy.start()
    for view in views:
        first.add(view)
    for _ in views:
        first.remove(first.choose(DEVICES[0]))
    third = policy.start()
    for view in views:
        second.add(view)
        third.add(view)
    assert second.choose(DEVICES[0]) is third.choose(DEVICES[0])


def test_it_remembers_nothing(policy, rng):
    views = some_views(rng)
    before = policy.choose(DEVICES[0], views)
    for _ in range(5):
        policy.choose(DEVICES[1], some_views(rng))
    assert policy.choose(DEVICES[0], views) is before


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("max_concurrent", [None, 2])
def test_every_unit_runs_once_in_order_and_every_job_ends(policy, rng, num_devices, max_concurrent):
    jobs = some_jobs(rng)
    pool = drive(jobs, policy=policy, num_devices=num_devices, max_concurrent=max_concurrent, step_seconds=2.0)
    assert pool.ran == jobs
    assert sorted(pool.released) == sorted(jobs)
    totals = [sum(unit.seconds for unit in units) for units in jobs.values()]
    # No device is idle while a job waits, so even the worst choice takes less than the two parts of the bound together.
    assert makespan_bound(totals, num_devices) <= pool.now
    if max_concurrent is None:
        assert pool.now <= sum(totals) / num_devices + max(totals)
