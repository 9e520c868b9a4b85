"""What handing over a copy takes is measured once, counted by plans, and leaves smaller copies to the computing thread."""

import itertools

import pytest
import torch

from hydra_tune.planner.profile.copy_handoff_cost import hand_seconds
from hydra_tune.planner.profile.profiler import CpuClock, SubArrayProfiler, copied_at
from tests.unit.planner.made import sub_array

CPU = torch.device("cpu")


def test_it_is_what_steps_take_longer_with_copies_for_each_of_them():
    """Of looks at the clock in pairs: a second without copies, with three there and back eight; the first warm up."""
    taken = [0.0, 1.0, 0.0, 99.0, *([0.0, 1.0, 0.0, 8.0] * 9)]
    found = hand_seconds(CPU, iter(taken).__next__)
    assert found == 7 / 6


def test_noise_does_not_make_it_nothing():
    taken = itertools.chain([0.0, 1.0, 0.0, 1.0], itertools.cycle([0.0, 8.0, 0.0, 1.0]))
    assert hand_seconds(CPU, taken.__next__) == 2e-5


def test_the_host_of_a_gpu_is_not_in_the_way():
    assert hand_seconds(torch.device("cuda", 0)) == 0.0


@pytest.mark.cases(1 / 3)
def test_it_is_measured_once_for_a_device_and_decides_who_copies():
    asked = []

    def hand(device):
        asked.append(device)
        return 5.0

    profiles = SubArrayProfiler(lambda _: CpuClock(), hand)
    first, second = (profiles.array("", sub_array("dlrm", count).step, CPU) for count in (2, 3))
    assert asked == [CPU]
    assert first.hand_seconds == second.hand_seconds == 5.0
    assert first.at_once == first.in_seconds.keys()
    assert (
        SubArrayProfiler(lambda _: CpuClock(), lambda _: 0.0).array("", sub_array("dlrm", 2).step, CPU).at_once
        == frozenset()
    )


def test_who_copies_depends_on_the_link():
    array = SubArrayProfiler(lambda _: CpuClock(), lambda _: 1e-3).array("", sub_array("dlrm", 2).step, CPU)
    sizes = {name: one.num_bytes for name, one in array.maps.items()}
    middle = sorted(sizes.values())[len(sizes) // 2]
    found = copied_at(array, middle / 1e-3)
    assert found.at_once == {name for name, size in sizes.items() if size <= middle}
    assert copied_at(array, 1.0, 1.0).at_once == frozenset()
