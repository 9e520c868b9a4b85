"""Profiles of steps, as planned on a device of the pool; each kind and number of trials is profiled once.

`FusionForecaster` (`fusion_report.py`) profiles the step of a task once the task's plan is made, if `HydraExecutor.plan`
(`executor.py`) is asked for a profile. The steps run for real, so the module must not touch a running job, and profiles a
GPU only while no unit runs there.

Note: lock order. A device is taken before the capture gate (`pool/devices/device_reservation.py`).
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch
from torch import nn

from hydra_tune.devices.device import Device
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.matching.fusion_key import fusion_key
from hydra_tune.fusion.runtime.profiling_device import host_of
from hydra_tune.fusion.runtime.step_planner import clock_of
from hydra_tune.fusion.runtime.task_profiles import TaskProfileCache
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.profile.profiler import SubArrayProfiler, over_link
from hydra_tune.planner.search.figures import StepFigures, figures_of
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.task import TrainTask


class StepProfileCache:
    """Makes and caches the profiles of a pool, without a lock, on the thread of a forecast with a single intra-op thread.

    Args:
        alone_on: returns a context in which no unit runs on a device, unless the device is the host.
    """

    def __init__(self, budget_bytes: int, alone_on: Callable[[Device], AbstractContextManager[object]]) -> None:
        self._alone_on = alone_on
        self._budget_bytes = budget_bytes
        self._profiles = SubArrayProfiler(clock_of)
        self._known: dict[Hashable, StepFigures] = {}

    def of(
        self,
        task: TrainTask,
        built: tuple[nn.Module, torch.optim.Optimizer],
        prepared: PreparedPlan,
        leaves: BatchLeaves,
        library: PlanLibrary,
        device: Device,
        num_trials: int,
    ) -> StepFigures:
        """Return the memory use within a trial's step, and the cost in time of less memory.

        The module and optimizer in `built` are only read, and of the first batch, `leaves`, only the geometry.

        Raises:
            UnfusableError: the steps cannot be planned; with the reason.
        """
        key = (fusion_key(task, *built), leaves.signature, task.max_grad_norm is None, num_trials)
        if key not in self._known:
            if not prepared.is_checked:
                raise UnfusableError("it is too large to be built and run here, and so its step cannot be timed")
            place = device.torch_device
            arrays = TaskProfileCache(task, built, prepared, leaves, library, self._profiles, place)
            is_duplex = place.type == "cuda"  # a CPU device copies both ways on a single thread
            bandwidth = host_of([device]).bandwidth

            def array(size: int) -> SubArrayProfile:
                with self._alone_on(device):
                    profile = arrays.array(size)
                return profile if bandwidth is None else over_link(profile, bandwidth)

            self._known[key] = figures_of(array, num_trials, self._budget_bytes, is_duplex=is_duplex)
        return self._known[key]
