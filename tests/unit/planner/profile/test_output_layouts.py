"""Steps are planned with their results as they lie on the device, not as tracing without bytes has it."""

from dataclasses import replace

import pytest
import torch

from hydra_tune.errors import UnfusableError
from hydra_tune.planner.profile.output_layouts import as_laid_out
from hydra_tune.planner.profile.profiler import CpuClock, measured
from tests.unit.planner.made import sub_array
from tests.unit.planner.run.test_planned_run import assert_same_as_unplanned, limited

CPU = torch.device("cpu")


@pytest.mark.cases(1 / 3)
def test_a_hardtanh_on_channels_last_images_is_planned():
    """Its backward keeps strides when it is traced, and makes them contiguous on a CPU."""
    step = sub_array("swish", laid_out=False).step
    with pytest.raises(UnfusableError, match=r"hardtanh_backward.* gives strides"):
        measured(step, CPU, CpuClock())
    found = as_laid_out(step, CPU)
    changed = [name for name, layout in found.seen.layouts.items() if layout != step.seen.layouts[name]]
    assert any("hardtanh" in name for name in changed)
    assert found.seen.sizes == step.seen.sizes
    measured(found, CPU, CpuClock())


def test_it_has_the_bits_of_the_unplanned_run():
    schedule = limited(("swish", "swish"), 0.5)
    assert any(one.swaps or one.recomputes for one in schedule.decisions)
    assert_same_as_unplanned(schedule, ("swish", "swish"))


def test_a_feature_map_that_lies_otherwise_is_found_before_it_is_sent_away():
    step = sub_array("cnn").step
    name = next(name for name in step.seen.layouts if name.startswith("relu"))
    wrong = replace(step.seen, layouts=step.seen.layouts | {name: ((1, 2, 3, 4, 5),)})
    assert as_laid_out(replace(step, seen=wrong), CPU).seen == step.seen
