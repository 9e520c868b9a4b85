"""Sharded-LRTF as printed: the longest wherever it is, and what choosing for the buffer among idle models does."""

import pytest

from hydra_tune.schedule import EarlyBinding, Fifo, LRTFPaper, ShardedLRTF, Unit, makespan_bound
from tests.unit.schedule.driver import drive
from tests.unit.schedule.policies.test_lrtf import HERE, THERE, view

STRUCTURES = pytest.mark.parametrize("structure", ["scan", "heap"])


@STRUCTURES
@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([view("a", 5.0), view("b", 9.0, on=THERE), view("c", 8.9, on=HERE, step_seconds=3.0)], "b"),
        ([view("b", 5.0), view("a", 5.0)], "a"),
        ([view("b", 0.0), view("a", 0.0), view("c", -1.0)], "a"),
    ],
    ids=["the longest wherever it is", "ties go to the earliest", "nothing left"],
)
def test_choice(structure, candidates, chosen):
    assert LRTFPaper(structure=structure).choose(HERE, candidates).job == chosen


def jobs(*seconds):
    return {f"job{index}": [Unit(kind="forward", shard=0, seconds=1.0)] * total for index, total in enumerate(seconds)}


@STRUCTURES
def test_among_idle_models_only_the_longest_is_passed_over_again_and_again(structure):
    unequal = jobs(40, 10, 10, 10, 10)
    late = drive(unequal, policy=LRTFPaper(structure=structure), num_devices=2)
    early = drive(unequal, policy=LRTFPaper(structure=structure, idle_only=True), num_devices=2)
    assert late.now == makespan_bound([40, 10, 10, 10, 10], 2) == 40
    assert early.now > 1.2 * late.now


def started(*views):
    selection = EarlyBinding(Fifo().start())
    for each in views:
        selection.add(each)
    return selection


def run_on(selection, device):
    chosen = selection.choose(device)
    selection.remove(chosen)
    return chosen.job


def test_the_job_that_follows_is_chosen_when_a_unit_starts():
    selection = started(view("b", 1.0), view("c", 1.0))
    assert run_on(selection, HERE) == "b"
    selection.add(view("a", 1.0))
    assert run_on(selection, HERE) == "c", "a came after the choice"
    assert run_on(selection, HERE) == "a"


def test_a_bound_job_waits_for_its_device_unless_nothing_else_is_left():
    selection = started(view("a", 1.0), view("b", 1.0), view("c", 1.0))
    assert run_on(selection, HERE) == "a"
    assert run_on(selection, THERE) == "c", "b is bound"
    assert run_on(selection, THERE) == "b"


def test_a_bound_job_stays_bound_with_another_view_and_not_when_it_is_gone():
    bound = view("b", 1.0)
    selection = started(view("a", 1.0), bound, view("c", 1.0))
    assert run_on(selection, HERE) == "a"
    selection.remove(bound)
    moved = view("b", 1.0, on=THERE)
    selection.add(moved)
    assert run_on(selection, THERE) == "c"
    selection.remove(moved)
    selection.add(view("d", 1.0))
    assert run_on(selection, HERE) == "d"


def test_a_lost_device_lets_go_of_its_job():
    selection = started(view("a", 1.0), view("b", 1.0), view("c", 1.0))
    assert run_on(selection, HERE) == "a"
    selection.set_speed(HERE, 0.0)
    assert run_on(selection, THERE) == "b"


def test_without_slack_the_default_chooses_the_same_but_for_place():
    unequal = jobs(9, 7, 5, 3)
    assert (
        drive(unequal, policy=LRTFPaper(), num_devices=2).now == drive(unequal, policy=ShardedLRTF(), num_devices=2).now
    )
