"""What steps take of an allocator that rounds, and of several kinds of devices."""

from dataclasses import replace

import pytest
import torch

from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.profile.allocator_rounding import allocated, on_all
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of
from hydra_tune.planner.run.runner import MergedGraphRunner
from tests.unit.planner.made import sub_array

ROUNDING = 512


def profiled(workspace_bytes):
    made = sub_array("dlrm")
    names = [node.name for node in made.step.ops]
    return made.step, array_of(
        "dlrm", made.step, GraphMeasurements(workspace_bytes=dict.fromkeys(names, workspace_bytes))
    )


@pytest.mark.cases(1 / 3)
def test_each_storage_is_as_large_as_its_allocation():
    step, array = profiled(0)
    found = allocated(array, step, ROUNDING)
    assert any(size % ROUNDING for size in array.sizes.values())
    assert found.sizes == {name: -(-size // ROUNDING) * ROUNDING for name, size in array.sizes.items()}
    others = [
        *step.inputs,
        *step.constants,
        *step.rates,
    ]  # parameters and state share allocations, which the planner counts
    beyond = sum(-step.seen.sizes[name] % ROUNDING for name in others)
    assert beyond > 0
    assert found.static_bytes == array.static_bytes + beyond
    limit = 1 << 60
    assert peak_of(undecided((found,), limit))[1].peak_bytes > peak_of(undecided((array,), limit))[1].peak_bytes


def test_what_results_are_rounded_by_was_profiled_as_room_to_work_in_and_counts_once():
    step, array = profiled(1000)
    found = allocated(array, step, ROUNDING)
    for before, after in zip((*array.forward, *array.backward), (*found.forward, *found.backward), strict=True):
        rounded = sum(found.sizes[name] - array.sizes[name] for name in before.makes)
        assert after == replace(before, workspace_bytes=max(0, 1000 - rounded))
    assert allocated(array, step, 1) is array


def test_host_memory_for_what_is_swapped_is_that_of_the_storage():
    """And not that of its allocation, which a copy of its bytes would not fill."""
    step, array = profiled(0)
    schedule = undecided((allocated(array, step, ROUNDING),), 1 << 60)
    odd = next(name for name in array.maps if array.sizes[name] % ROUNDING)
    decided = replace(schedule.decisions[0], swaps={odd: 0})
    run = MergedGraphRunner(
        replace(schedule, decisions=(decided,)), [step], torch.device("cpu"), [lambda _: {}], lambda *_: None, merged={}
    )
    assert run._copies._host[f"a0_{odd}"].nbytes == array.sizes[odd]
    run.close()


def test_of_several_kinds_of_devices_there_is_room_on_any():
    _, first = profiled(100)
    second = replace(
        first,
        forward=tuple(replace(op, workspace_bytes=300, seconds=9.0) for op in first.forward),
        backward=tuple(replace(op, workspace_bytes=5, seconds=9.0) for op in first.backward),
    )
    found = on_all([first, second])
    assert {op.workspace_bytes for op in found.forward} == {300}
    assert {op.workspace_bytes for op in found.backward} == {100}
    assert found.seconds == first.seconds
    assert on_all([first]) is first
