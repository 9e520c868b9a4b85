"""Planned pairs on a GPU: the bits of the unplanned step, copies on streams of their own, memory as planned."""

import os

import pytest
import torch

from hydra_tune.fusion.planner.memory import peak_of, simulated
from hydra_tune.fusion.planner.policy import planned
from hydra_tune.fusion.planner.profiler import Profiles
from hydra_tune.fusion.planner.run import PlannedRun
from hydra_tune.fusion.planner.schedule import Segment, undecided
from tests.unit.fusion.planner.made import run_unplanned, sub_array

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS, ROUNDING = 3, 512


@pytest.fixture(autouse=True)
def deterministic():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def planned_pair(name, share):
    pair = [sub_array(name, seed=seed, device="cuda") for seed in (1, 2)]
    array = Profiles().array(name, pair[0].step, torch.device("cuda"))
    whole = undecided((array, array), 1 << 60)
    rest = peak_of(whole)[1].peak_bytes - whole.static_bytes
    schedule, _ = planned(undecided((array, array), whole.static_bytes + int(share * rest)))

    def draw(side, number):
        return pair[side].step.noise[number].draw(pair[side].generators, torch.device("cuda"))

    steps = [made.step for made in pair]
    return schedule, pair, PlannedRun(schedule, steps, torch.device("cuda"), [made.arguments for made in pair], draw)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
@pytest.mark.parametrize("name", ["cnn", "resnet", "transformer", "dlrm"])
def test_results_are_the_unplanned_runs_bit_for_bit(name, share):
    schedule, pair, run = planned_pair(name, share)
    losses = {}
    run.run((STEPS, STEPS), lambda side, number, found: losses.update({(side, number): found.clone()}))
    run.close()
    for side, seed in enumerate((1, 2)):
        other = sub_array(name, seed=seed, device="cuda")
        for number in range(STEPS):
            assert torch.equal(losses[side, number], run_unplanned(other, number))
        assert all(torch.equal(a, b) for a, b in zip(pair[side].everything(), other.everything(), strict=True))
    assert share == 1.0 or any(one.swaps or one.recomputes for one in schedule.decisions)


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_no_more_is_allocated_than_was_planned(share):
    schedule, pair, run = planned_pair("resnet", share)
    arguments = [made.arguments(0) for made in pair]
    run._arguments = [lambda _number, found=found: found for found in arguments]
    for segment in (Segment(None, 0), Segment(0, 1)):
        run.segment(segment)
    torch.cuda.synchronize()
    segment = Segment(1, 0)
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
