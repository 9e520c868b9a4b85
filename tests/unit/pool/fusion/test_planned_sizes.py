"""With a planner a device never has fewer trials at once than without, and usually many more."""

import functools

import pytest

from benchmarks.planned_pool import peak_of_one, sizes_of
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.runtime.planned_group_size import PlannedSizeChooser
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.train.data.index_gather import UngatheredBatches
from tests.unit.pool.fusion.test_planned_steps import task
from tests.unit.pool.tasks import running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]

TRIALS, STEPS = 16, 4
MULTIPLES = [1.3, 1.7, 2.5, 5, 10]  # of the memory that one trial needs


@functools.cache
def at_once(planner, multiple):
    """Trials of the largest job, and of the largest group."""
    memory = int(multiple * peak_of_one("cnn", is_double=True))
    jobs, groups = sizes_of(planner, memory, "cnn", TRIALS, STEPS)
    return max(jobs, default=1), max(groups)


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [1.3, *(pytest.param(one, marks=pytest.mark.slow) for one in MULTIPLES[1:])])
def test_a_planner_never_has_fewer_trials_on_a_device_than_fit_without(multiple):
    with_plans, without = at_once("on", multiple), at_once("off", multiple)
    assert with_plans[0] > without[0]
    assert with_plans[1] >= without[1]


@pytest.mark.slow
def test_in_most_memories_a_planner_has_half_as_many_again():
    gains = [at_once("on", multiple)[0] / at_once("off", multiple)[0] for multiple in MULTIPLES]
    assert sum(gain >= 1.5 for gain in gains) >= 3


@pytest.mark.slow
def test_a_planned_group_that_runs_out_of_memory_goes_on_in_groups_that_need_no_plan(monkeypatch):
    """Three trials fit without a plan, so halves of four would be too few."""

    def runs_out(self, operands):
        raise OutOfMemoryError("as it happens", enough_bytes=None)

    monkeypatch.setattr(GroupStepRunner, "forward", runs_out)
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory="490KiB") as pool:
        results = pool.run([task(seed, epochs=8) for seed in range(4)])
    assert [result.error for result in results] == [None] * 4
    assert max(result.group_size for result in results) == 3


@pytest.mark.cases(1 / 3)
def test_members_that_have_begun_and_draw_picks_are_planned_with_their_first_batch():
    """Such members come back from a group that had no slot for them after all."""
    device = CpuDevice(0, 1 << 30)
    budget = ShardPlanConstraints(budget_bytes=390 << 10, buffer_fraction=0.0, alignment=device.alignment)
    library = PlanLibrary(budget)
    members = [MemberTrial(task(seed), library, device) for seed in range(4)]
    try:
        for member in members:
            member.built()
            member.identify()
            member.is_fused = True
            member.go_on()
        with members[0].peek() as first_batches:
            wanted = first_batches["train"]
        assert isinstance(wanted.drawn, UngatheredBatches)
        planner = StepPlanner(budget.budget_bytes, budget.alignment)
        choice = PlannedSizeChooser(GroupPlanFactory(library), planner, insists=True).best("kind", members, wanted, 2)
        assert choice is not None
        assert choice.size == 4
    finally:
        for member in members:
            member.close(keep=False)
        device.close()
