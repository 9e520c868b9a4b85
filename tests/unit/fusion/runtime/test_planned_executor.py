"""A planned step on the device of the unit that runs it: another one for each unit, if need be."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.fusion.runtime.planned_executor import DeviceStepRunner
from hydra_tune.fusion.runtime.step_arguments import sent
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of, copied_at
from tests.unit.planner.made import run_unplanned, sub_array

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)  # to torch not the same place


def steps_of(made):
    array = copied_at(array_of("dlrm", made.step, GraphMeasurements()), 1e9)
    schedule = undecided((array,), 1 << 60)
    name = next(iter(array.maps))
    swaps = {name: array.maps[name].first_backward}
    schedule = replace(schedule, decisions=(replace(schedule.decisions[0], swaps=swaps),))
    planned = SimpleNamespace(graphs=(made.step,), part=SimpleNamespace(schedule=schedule))
    number = [0]

    def draw(_side, index):
        return made.step.noise[index].draw(made.generators, FIRST)

    return number, DeviceStepRunner(planned, [lambda: made.arguments(number[0])], draw)


def make_step(steps, losses):
    for segment in steps.planned.part.schedule.segments:
        losses += filter(None, [steps.segment(segment)])  # of the forward alone


@pytest.mark.cases(1 / 3)
def test_each_unit_may_run_on_another_one_with_the_same_bits():
    made, other = sub_array("dlrm"), sub_array("dlrm")
    number, steps = steps_of(made)
    losses, runs = [], []
    for place in (FIRST, FIRST, SECOND, FIRST):
        steps.on(SimpleNamespace(torch_device=place, name=str(place)))
        before = steps.seconds
        make_step(steps, losses)
        assert steps.seconds > before
        runs.append(steps._run)
        number[0] += 1
    assert [run is runs[0] for run in runs] == [True, True, False, False]
    assert not runs[0]._copies._thread.is_alive(), "host memory and threads go with the device"
    steps.close()
    for number_now, found in enumerate(losses):
        assert found == run_unplanned(other, number_now).tolist()


def test_swaps_take_the_link_of_the_device_that_the_unit_runs_on():
    """CPU devices are one place to torch, and each has a link of its own."""
    made = sub_array("dlrm")
    _, steps = steps_of(made)
    devices = [CpuDevice(index, 1 << 30, bandwidth) for index, bandwidth in enumerate((1e9, 1e9, None))]
    sent = {device.name: [] for device in devices}
    for device in devices[:2]:
        device.link.send = lambda copy, nbytes, name=device.name, **_: (sent[name].append(nbytes), copy())
    counts = []
    for device in (devices[0], devices[1], devices[1], devices[2]):
        steps.on(device)
        make_step(steps, [])
        counts.append([len(one) for one in sent.values()])
    steps.close()
    assert counts == [[2, 0, 0], [2, 2, 0], [2, 4, 0], [2, 4, 0]]
    for device in devices:
        device.close()


def test_what_was_planned_for_devices_of_another_kind_is_refused_by_name():
    _, steps = steps_of(sub_array("dlrm"))
    with pytest.raises(OutOfMemoryError, match="planned for devices of the kind 'cpu', and cuda:0 is of another kind"):
        steps.on(SimpleNamespace(torch_device=torch.device("cuda", 0), name="cuda:0"))


class Batch:
    """A tensor of the host, in memory that a GPU can copy by itself or not."""

    device = FIRST

    def __init__(self, log, *, is_pinned):
        self.log, self._is_pinned = log, is_pinned

    def is_pinned(self):
        return self._is_pinned

    def pin_memory(self):
        self.log.append("pinned")
        return Batch(self.log, is_pinned=True)

    def to(self, place, *, non_blocking):
        assert self._is_pinned, "the host would wait for all that was asked of the GPU before"
        self.log.append((place, non_blocking))
        return place


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_is_sent_to_a_gpu_is_copied_from_pinned_memory_without_waiting(is_pinned):
    gpu, log = torch.device("cuda", 0), []
    assert sent(Batch(log, is_pinned=is_pinned), gpu) == gpu
    assert log == ([] if is_pinned else ["pinned"]) + [(gpu, True)]
    here = Batch(log, is_pinned=False)
    assert sent(here, FIRST) is here
