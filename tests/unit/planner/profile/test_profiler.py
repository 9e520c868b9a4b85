"""Algorithm A: medians of three runs after a warm-up, maps away between forward and backward, each graph measured once."""

import itertools
from dataclasses import replace

import pytest
import torch

from hydra_tune.errors import UnfusableError
from hydra_tune.planner.profile import profiler
from hydra_tune.planner.profile.profiler import CpuClock, SubArrayProfiler, copied_at, measured, over_link
from tests.support.tracker import StorageTracker
from tests.unit.planner.hand import chain
from tests.unit.planner.made import sub_array

CPU = torch.device("cpu")


class Ticks(CpuClock):
    """A clock of which each run is as slow as told."""

    def __init__(self, speeds):
        super().__init__()
        self._speeds, self.runs = speeds, 0

    def timed(self, name, action):
        self._found[name] = self._speeds[self.runs]
        return action()

    def whole(self):
        return None

    def seconds(self):
        self.runs += bool(self._found)
        return super().seconds()


def test_times_are_medians_of_three_runs_after_one_that_does_not_count():
    clock = Ticks([100.0, 3.0, 1.0, 2.0])
    found = measured(sub_array("dlrm").step, CPU, clock)
    assert clock.runs == 4
    assert set(found.seconds.values()) == {2.0}
    assert set(found.out_seconds.values()) == set(found.in_seconds.values()) == {2.0}


class Steps(CpuClock):
    """A clock that goes on by one at each look, so that a look costs as much as a node."""

    def __init__(self):
        self.looks = 0
        super().__init__(self._look)

    def _look(self):
        self.looks += 1
        return float(self.looks)


def test_where_the_host_computes_nodes_add_up_to_what_whole_passes_take():
    step = sub_array("dlrm").step
    maps = SubArrayProfiler().array("", step, CPU).maps
    stretches = (
        len({one.last_forward for one in maps.values()} | {-1 - one.first_backward for one in maps.values()}) + 1
    )
    found = measured(step, CPU, Steps())
    assert sum(found.seconds.values()) == pytest.approx(stretches)
    assert max(found.seconds.values()) < 1


class Slower(Steps):
    """A clock that goes on by more at each look, as of a machine that has become slower."""

    by = 1.0

    def _look(self):
        self.looks += self.by
        return float(self.looks)


@pytest.mark.cases(1 / 3)
def test_a_graph_profiled_while_the_machine_is_slower_is_told_as_at_the_pace_of_the_first():
    clocks = []

    def clock(_device):
        clocks.append(Slower())
        clocks[-1].by = 1.0 if len(clocks) == 1 else 3.0
        return clocks[-1]

    steps = [sub_array("dlrm", count).step for count in (2, 3, 2)]
    profiles = SubArrayProfiler(clock, hand=lambda _: 0.5)
    first, slower = (profiles.array("", step, CPU) for step in steps[:2])
    alone = SubArrayProfiler(clock, hand=lambda _: 0.5).array("", steps[1], CPU)
    assert len(clocks) == 3
    assert alone.seconds == pytest.approx(3 * slower.seconds)
    assert slower.seconds == pytest.approx(first.seconds), "as many looks, each a stretch"
    assert slower.hand_seconds == 0.5


def test_a_sub_array_has_all_that_the_planner_asks_for():
    step = sub_array("cnn").step
    array = SubArrayProfiler().array("cnn", step, CPU)
    assert [op.name for op in (*array.forward, *array.backward)] == [node.name for node in step.ops]
    assert array.static_bytes == sum(t.numel() * t.element_size() for t in step.geometry.values())
    assert array.maps.keys() <= array.in_seconds.keys()
    norms = [op for op in array.forward if op.name.startswith("native_batch_norm")]
    assert [len(op.writes) for op in norms] == [2, 2, 2]
    assert all(op.repeated_writes == op.writes for op in norms)
    drawn = [op for op in array.forward if op.is_random]
    assert len(drawn) == 1
    order = sorted(array.maps.values(), key=lambda one: one.inactive_seconds)
    assert order[0].made > order[-1].made


def test_each_graph_is_measured_once_for_a_device():
    asked = []

    def clock(device):
        asked.append(device)
        return CpuClock()

    profiles = SubArrayProfiler(clock)
    for name, count in (("dlrm", 2), ("dlrm", 2), ("dlrm", 3)):
        profiles.array(name, sub_array(name, count).step, CPU)
    assert len(asked) == 2


def test_the_profiles_that_were_asked_for_last_are_kept(monkeypatch):
    monkeypatch.setattr(profiler, "_MAX_KEPT", 2, raising=False)
    profiles = SubArrayProfiler(lambda _: Ticks([1.0] * 4), hand=lambda _: 0.5)
    steps = [sub_array("dlrm", count).step for count in (2, 3, 4)]
    for number in (0, 1, 0, 2):
        profiles.array("", steps[number], CPU)
    assert [profiles.knows(step, CPU) for step in steps] == [True, False, True]


@pytest.mark.cases(1 / 3)
def test_a_graph_larger_than_memory_is_profiled_with_its_maps_away():
    """At no time is there more than the static tensors, what one node needs, and what the backward has got back."""
    step = sub_array("resnet").step
    tracker = StorageTracker()
    with tracker():
        measured(step, CPU, CpuClock())
    array = SubArrayProfiler().array("", step, CPU)
    maps = sum(one.num_bytes for one in array.maps.values())
    on_host = maps
    assert tracker.peak_bytes[0] - on_host < array.static_bytes + maps / 2


@pytest.mark.parametrize("bandwidth", [1e3, 1e6])
def test_a_link_can_be_of_another_bandwidth(bandwidth):
    array = SubArrayProfiler(hand=lambda _: 0.0).array("dlrm", sub_array("dlrm").step, CPU)
    other = copied_at(array, bandwidth, 0.5)
    assert other.in_seconds == {n: one.num_bytes / bandwidth + 0.5 for n, one in array.maps.items()}
    assert replace(other, in_seconds=array.in_seconds, out_seconds=array.out_seconds) == array


@pytest.mark.cases(1 / 3)
def test_maps_that_lie_longest_are_those_made_first():
    array = SubArrayProfiler(lambda _: Ticks(list(itertools.repeat(1.0, 4)))).array(
        "", sub_array("transformer").step, CPU
    )
    (first, *_, last) = array.maps.values()
    assert first.inactive_seconds > last.inactive_seconds


def test_what_lies_otherwise_than_the_step_says_is_refused(monkeypatch):
    """Bytes that come back from the host would be read wrong."""
    step = sub_array("cnn").step
    name = next(name for name in step.seen.layouts if "relu" in name)
    monkeypatch.setitem(step.seen.layouts, name, ((9, 9, 9, 9, 9),))
    with pytest.raises(UnfusableError, match=r"relu.* gives strides .* runs unplanned"):
        measured(step, CPU, CpuClock())


def test_over_a_simulated_link_no_copy_takes_less_than_its_bytes_take_there():
    array = copied_at(chain(3, num_bytes=100), 50.0)
    slow, fast = over_link(array, 10.0), over_link(array, 1e9)
    assert slow.in_seconds == slow.out_seconds == dict.fromkeys(array.maps, 10.0)
    assert fast.in_seconds == array.in_seconds == dict.fromkeys(array.maps, 2.0)


def test_the_computing_thread_makes_no_copy_over_a_link_itself():
    array = replace(copied_at(chain(3, num_bytes=100), 1e9), at_once=frozenset({"z0"}))
    assert over_link(array, 10.0).at_once == frozenset()
