"""Planned steps on a GPU: the bits of the unplanned step, copies on streams of their own, memory as planned."""

import pytest
import torch

from hydra_tune.planner.cost.peak_memory import peak_of, simulated
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.passes.swap_recompute import planned
from hydra_tune.planner.profile.profiler import SubArrayProfiler
from hydra_tune.planner.run.copy_engine import CudaCopyEngine
from hydra_tune.planner.run.runner import MergedGraphRunner
from tests.unit.planner.made import run_unplanned, sub_array

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
STEPS, ROUNDING = 3, 512
LAST = f"cuda:{max(0, torch.cuda.device_count() - 1)}"  # not the current one, where there are several


def planned_run(name, share, seeds=(1, 2), place=LAST):
    """As many sub-arrays as seeds, and a plan of them within a share of what they would have beside their static tensors."""
    device = torch.device(place)
    made = [sub_array(name, seed=seed, device=place) for seed in seeds]
    array = SubArrayProfiler().array(name, made[0].step, device)
    arrays = (array,) * len(made)
    whole = undecided(arrays, 1 << 60)
    rest = peak_of(whole)[1].peak_bytes - whole.static_bytes
    schedule, _ = planned(undecided(arrays, whole.static_bytes + int(share * rest)))

    def draw(side, number):
        return made[side].step.noise[number].draw(made[side].generators, device)

    run = MergedGraphRunner(schedule, [one.step for one in made], device, [one.arguments for one in made], draw)
    return schedule, made, run


def assert_as_unplanned(name, made, run, seeds=(1, 2), place=LAST):
    losses = {}
    run.run((STEPS,) * len(seeds), lambda side, number, found: losses.update({(side, number): found.clone()}))
    run.close()
    for side, seed in enumerate(seeds):
        other = sub_array(name, seed=seed, device=place)
        for number in range(STEPS):
            assert torch.equal(losses[side, number], run_unplanned(other, number))
        assert all(torch.equal(a, b) for a, b in zip(made[side].everything(), other.everything(), strict=True))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
@pytest.mark.parametrize("name", ["cnn", "resnet", "transformer", "dlrm"])
def test_results_are_the_unplanned_runs_bit_for_bit(name, share):
    schedule, made, run = planned_run(name, share)
    assert_as_unplanned(name, made, run)
    assert share == 1.0 or any(one.swaps or one.recomputes for one in schedule.decisions)


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_so_are_those_of_one_sub_array_alone(share):
    schedule, made, run = planned_run("cnn", share, seeds=(1,))
    assert_as_unplanned("cnn", made, run, seeds=(1,))
    assert any(one.swaps or one.recomputes for one in schedule.decisions)


@pytest.mark.parametrize("direction", ["_out", "_in"])
def test_copies_that_are_late_change_no_bit(direction, monkeypatch):
    """The compute stream is far ahead of them on the host: memory that they still read or write must not be another's."""
    queued, late = CudaCopyEngine._queued, []

    def after_a_while(self, stream, action):
        if stream is getattr(self, direction):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # about a millisecond
            late.append(stream)
        return queued(self, stream, action)

    monkeypatch.setattr(CudaCopyEngine, "_queued", after_a_while)
    schedule, made, run = planned_run("resnet", 0.5)
    assert_as_unplanned("resnet", made, run)
    assert bool(late) == any(one.swaps for one in schedule.decisions)


def test_kernels_are_timed_where_they_run():
    """On the last GPU, which need not be the current one."""
    made = sub_array("cnn", device=LAST)
    array = SubArrayProfiler().array("cnn", made.step, torch.device(LAST))
    assert sum(op.seconds for op in (*array.forward, *array.backward)) > 1e-5
    assert all(0 <= op.workspace_bytes < 1 << 30 for op in (*array.forward, *array.backward))
    assert min(array.out_seconds.values()) > 0
    assert min(array.in_seconds.values()) > 0


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_no_more_is_allocated_than_was_planned(share):
    schedule, pair, run = planned_run("resnet", share, place="cuda:0")
    arguments = [made.arguments(0) for made in pair]
    run._arguments = [lambda _number, found=found: found for found in arguments]
    for segment in (ScheduleSegment(None, 0), ScheduleSegment(0, 1)):
        run.segment(segment)
    torch.cuda.synchronize()
    segment = ScheduleSegment(1, 0)
    beside = torch.cuda.memory_allocated() - sum(
        one.num_bytes
        for name, one in schedule.arrays[1].maps.items()
        if name not in schedule.decisions[1].swaps and name not in schedule.decisions[1].recomputes
    )
    torch.cuda.reset_peak_memory_stats()
    run.segment(segment)
    torch.cuda.synchronize()
    run.close()
    found = torch.cuda.max_memory_allocated() - beside
    predicted = simulated(schedule, segment).peak_bytes - schedule.static_bytes
    assert found <= predicted + ROUNDING * 200
