"""What sets each of the other policies apart."""

import gc
import weakref
from itertools import groupby

import pytest

from hydra_tune.schedule import LPT, SRTF, Fair, RandomChoice, RoundRobin, ShardedLRTF, Unit
from hydra_tune.schedule.levels import PriorityLevels
from tests.unit.schedule.driver import VirtualPool, drive
from tests.unit.schedule.policies.test_lrtf import HERE, THERE, view

UNIT = Unit(kind="forward", shard=0, seconds=1.0)


class Sequence:
    """Any policy, and what it chose."""

    def __init__(self, policy):
        self.policy, self.chosen = policy, []

    def choose(self, device, candidates):
        view = self.policy.choose(device, candidates)
        self.chosen.append(view.job)
        return view


def chosen(policy, jobs, num_devices=1):
    sequence = Sequence(policy)
    drive({job: [UNIT] * count for job, count in jobs.items()}, policy=sequence, num_devices=num_devices)
    return "".join(sequence.chosen)


def test_shortest_remaining_time_finishes_the_shortest_first():
    assert chosen(SRTF(), {"a": 3, "b": 1, "c": 2}) == "bccaaa"


def test_round_robin_takes_turns():
    assert chosen(RoundRobin(), {"a": 3, "b": 1, "c": 2}) == "abcaca"


def test_fair_brings_all_to_their_ends_together():
    order = chosen(Fair(), {"a": 2, "b": 8})
    assert order == "abbbbabbbb"


def test_longest_processing_time_keeps_a_trial_on_its_device_to_the_end():
    jobs = {"a": 2, "b": 5, "c": 4, "d": 3}
    assert [job for job, _ in groupby(chosen(LPT(), jobs))] == ["b", "c", "d", "a"]
    pool = drive({job: [UNIT] * count for job, count in jobs.items()}, policy=LPT(), num_devices=2)
    assert pool.num_loads == len(jobs), "each on one device"
    assert isinstance(pool, VirtualPool)
    assert pool.now == 7.0


def test_longest_processing_time_among_several_begun_here_goes_on_with_the_last():
    begun = [view(job, 5.0)._replace(last_device=HERE, turn=turn) for job, turn in (("a", 3), ("b", 7), ("c", 5))]
    assert LPT().choose(HERE, begun).job == "b"
    assert LPT().choose(THERE, [*begun, view("d", 1.0)]).job == "d", "one that no device has"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "policy", [SRTF(), LPT(), ShardedLRTF(), RandomChoice()], ids=lambda policy: type(policy).__name__
)
def test_only_selections_of_jobs_alone_are_dropped_with_old_priorities(policy):
    begun = weakref.WeakSet()

    def start():
        selection = policy.start()
        begun.add(selection)
        return selection

    levels = PriorityLevels(start)
    levels.add(view("b", 1.0), (-2000, False))
    passing = view("a", 2.0)
    for priority in range(1000):
        levels.add(passing, (-priority, False))
        assert levels.choose(HERE) is passing
        levels.remove(passing, (-priority, False))
    gc.collect()
    assert len(begun) == 1001 if isinstance(policy, RandomChoice) else len(begun) <= 64
    assert levels.choose(HERE).job == "b"


def test_random_takes_all_alike_and_the_same_with_the_same_seed():
    selection = RandomChoice(seed=1).start()
    views = [view(job, 1.0) for job in "abcd"]
    for each in views:
        selection.add(each)
    counts = dict.fromkeys("abcd", 0)
    for _ in range(4000):
        drawn = selection.choose(HERE)
        counts[drawn.job] += 1
        selection.remove(drawn)
        selection.add(drawn)
    assert all(850 < count < 1150 for count in counts.values())
    jobs = dict.fromkeys("abcdefgh", 4)
    pools = [
        drive({job: [UNIT] * count for job, count in jobs.items()}, policy=RandomChoice(seed=seed), num_devices=2)
        for seed in (1, 1, 2)
    ]
    assert pools[0].released == pools[1].released != pools[2].released
