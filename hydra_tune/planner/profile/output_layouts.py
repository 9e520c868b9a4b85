"""Memory layouts of operator results, found by a run on the device: kernels do not always follow the trace.

On channels-last images, for instance, torch's `hardtanh_backward` keeps the strides when traced without bytes, and
gives contiguous strides on a CPU. A plan reads bytes that come back from the host by their traced strides, and the
operators behind are traced on the same strides. So a traced step runs on the device. Where a result lies otherwise, the
storages of the step's nodes are found again with the device's layout, and the step runs again, until a run finds no
other layout. `StepPlanner` (`fusion/runtime/step_planner.py`) and `TaskProfileCache`
(`fusion/runtime/task_profiles.py`) call `as_laid_out` on each step that they have traced.

Note: gate. `as_laid_out` takes `GATE` (`shard/capture/capture_lock.py`) itself, shared to compute and alone to trace, so
the caller must be outside. The caller borrows the device. The module must not know plans.
"""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hydra_tune.errors import UnfusableError
from hydra_tune.planner.ir.aliasing import Layout, StorageAccessTable, seen
from hydra_tune.planner.profile.profiler import CpuClock, GraphMeasurements, array_of
from hydra_tune.planner.profile.profiling_interpreter import ProfilingInterpreter
from hydra_tune.planner.trace.step_graph import StepGraph
from hydra_tune.shard.capture.capture_lock import GATE


def as_laid_out(step: StepGraph, device: torch.device) -> StepGraph:
    """Return the step with the layouts that its results have on a device.

    Raises:
        UnfusableError: an operator fails on made-up numbers or on the device's layout; a view's layout or a result's
            size differs from the trace; or a layout differs from run to run.
    """
    layouts: dict[str, Layout] = {}
    while True:
        # The run computes, and so shares the gate. Finding the storages again is tracing, which holds the gate alone.
        with GATE.shared():
            maps = array_of("", step, GraphMeasurements()).maps
            deviations = ProfilingInterpreter(step, maps, device, CpuClock()).otherwise_laid()
        if not deviations:
            return step
        # A run stops before a feature map of a wrongly traced layout goes to the host, so later nodes show up only in the
        # next round. A node that shows up again after its correction has no fixed layout.
        if deviations.keys() <= layouts.keys():
            names = ", ".join(sorted({str(node.target) for node in step.ops if node.name in deviations}))
            raise UnfusableError(
                f"the memory layout of the results of {names} changes from run to run; it runs unplanned"
            )
        layouts |= deviations
        with GATE.exclusive():
            step = replace(step, seen=_seen_again(step, layouts))


def _seen_again(step: StepGraph, layouts: dict[str, Layout]) -> StorageAccessTable:
    like = next(iter(step.geometry.values()))
    assert isinstance(like, FakeTensor), "geometry is without bytes"
    with like.fake_mode:
        noise = [noise_draw.room(like.size(0), like.device) for noise_draw in step.noise]
    try:
        return seen(step.graph, step.owner, step.geometry, noise, like.fake_mode, layouts)
    except Exception as error:
        names = ", ".join(sorted({str(node.target) for node in step.ops if node.name in layouts}))
        raise UnfusableError(
            f"the device lays the results of {names} out differently from the trace, and a later operator fails on that layout "
            f"({type(error).__name__}: {error}); it runs unplanned; composed of simpler operators, the step may be planned"
        ) from error
