"""How results of operators lie in memory, found by a run on the device: kernels do not always do what tracing says.

On channels-last images, for instance, torch's `hardtanh_backward` traced without bytes keeps the strides, and on a CPU gives
contiguous ones. Bytes that come back from the host are read by their traced strides, and the operators behind are traced with
them. So a traced step is run once, and where something lies otherwise, what its nodes make is looked at anew with that.
"""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.planner.profiled_run import ProfiledRun
from hydra_tune.fusion.planner.profiler import CpuClock, Profile, array_of
from hydra_tune.fusion.planner.step_graph import StepGraph
from hydra_tune.fusion.planner.storages import Layout, Seen, seen
from hydra_tune.shard.gate import GATE


def as_laid_out(step: StepGraph, device: torch.device) -> StepGraph:
    """A step as its results lie on a device.

    Args:
        step: traced.
        device: where it runs.

    Raises:
        UnfusableError: an operator fails on numbers made up, or with what lies otherwise than traced.
    """
    layouts: dict[str, Layout] = {}
    while True:
        with GATE.shared():
            maps = array_of("", step, Profile()).maps
            found = ProfiledRun(step, maps, device, CpuClock()).otherwise_laid()
        if not found:
            return step
        if found.keys() <= layouts.keys():
            names = ", ".join(sorted({str(node.target) for node in step.ops if node.name in found}))
            raise UnfusableError(f"results of {names} lie in memory differently each time; it runs unplanned")
        layouts |= found
        with GATE.exclusive():
            step = replace(step, seen=_seen_again(step, layouts))


def _seen_again(step: StepGraph, layouts: dict[str, Layout]) -> Seen:
    like = next(iter(step.geometry.values()))
    assert isinstance(like, FakeTensor), "geometry is without bytes"
    with like.fake_mode:
        drawn = [one.room(like.size(0), like.device) for one in step.noise]
    try:
        return seen(step.graph, step.owner, step.geometry, drawn, like.fake_mode, layouts)
    except Exception as error:
        names = ", ".join(sorted({str(node.target) for node in step.ops if node.name in layouts}))
        raise UnfusableError(
            f"results of {names} lie in memory otherwise than traced, which an operator behind them cannot take "
            f"({type(error).__name__}: {error}); it runs unplanned. An equivalent that is written out may be planned"
        ) from error
