"""Forecast of fusion before training: which tasks can form a group, and the gain in time per step.

`Pool` (`pool/pool.py`) keeps one `FusionForecaster`; `report.py` asks about each task as soon as the task's plan is made,
on the thread of the forecast. `cli/dry_run/plan_table.py` and `cli/dry_run/plan_figures.py` print the forecasts for
`hydra-tune plan`. A forecast must never fail a plan: errors become the reasons of the forecast. The module must not touch
a running job. A `FusionForecaster` has no lock.
"""

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hydra_tune.devices.device import Device
from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, check_updates, room_for
from hydra_tune.fusion.matching.fusion_key import check_task, fusion_key
from hydra_tune.fusion.matching.group_size_chooser import UntracedPlanFactory, timed_alone
from hydra_tune.fusion.matching.group_size_policy import FusionStepTimes, chosen_size, next_size, sizes, why
from hydra_tune.fusion.matching.group_timing import FusionBenchmark
from hydra_tune.fusion.runtime.plan_report import PlannedSizeChoice
from hydra_tune.fusion.runtime.planned_group_size import compared, kept_way
from hydra_tune.fusion.runtime.profiling_device import host_of
from hydra_tune.fusion.runtime.step_planner import StackedStepSpec, StepPlanner, check_planned, stack_of
from hydra_tune.planner.search.figures import StepFigures
from hydra_tune.pool.dry_run.step_profiles import StepProfileCache
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.task import TrainTask

_LOGGER = logging.getLogger("hydra_tune.fusion")
_MANY = float("inf")

FusionOf = Callable[
    [TrainTask, tuple[nn.Module, torch.optim.Optimizer], PreparedPlan, BatchLeaves, PlanLibrary, Device],
    "FusionForecast",
]
"""`FusionForecaster.of` with its options bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionForecast:
    """Fusion forecast of a task.

    Attributes:
        group: equal numbers stand for tasks that can form a group, among all tasks planned by the pool; None: the task
            can join no group.
        why_alone: the reason why the task can join no group; None otherwise.
        room: number of members that fit a device and that a group may have.
        alone_seconds: seconds per step of the task alone, where measured; else None.
        drawing_seconds: seconds to draw a batch, where measured; else None.
        group_seconds: seconds per step of a whole group, by number of members, where measured; measured as a group
            begins, before its step is traced.
        size: number of members that `fusion="auto"` would choose if enough members with many remaining steps existed;
            1: the task would run alone; None where nothing was measured.
        told: the choice of `size` in words, with the figures; or the reason why the task cannot be measured.
        planned: how the largest allowed number of members would be computed with planned steps, where a device has room
            for fewer; evaluations are not counted. None where all members fit, the answer is unknown, or nothing was
            measured.
        why_not_planned: the reason why no steps are planned; None where they are planned, or the plan was not
            requested.
        figures: memory use within a step, and the cost in time of less memory, where requested and known.
        why_no_figures: the reason for missing figures; None where figures exist or were not requested.
    """

    group: int | None
    why_alone: str | None = None
    room: int = 1
    alone_seconds: float | None = None
    drawing_seconds: float | None = None
    group_seconds: dict[int, float] = field(default_factory=dict)
    size: int | None = None
    told: str | None = None
    planned: PlannedSizeChoice | None = None
    why_not_planned: str | None = None
    figures: StepFigures | None = None
    why_no_figures: str | None = None


class FusionForecaster:
    """Numbers the groups of a pool, and remembers measured times.

    Args:
        alone_on: returns a context in which no unit runs on a device, unless the device is the host.
    """

    def __init__(self, budget_bytes: int, alone_on: Callable[[Device], AbstractContextManager[object]]) -> None:
        self._budget_bytes = budget_bytes
        self._numbers: dict[Hashable, int] = {}
        self._timings: dict[Hashable, FusionStepTimes] = {}
        self._planned: dict[Hashable, PlannedSizeChoice] = {}
        self._figures = StepProfileCache(budget_bytes, alone_on)

    def of(
        self,
        task: TrainTask,
        built: tuple[nn.Module, torch.optim.Optimizer],
        prepared: PreparedPlan,
        leaves: BatchLeaves,
        library: PlanLibrary,
        device: Device,
        *,
        most: int,
        probes: bool,
        profiled: int = 0,
    ) -> FusionForecast:
        """Forecast whether a task can be computed together with tasks of the same kind.

        `built` (module and optimizer) and `leaves` (the first batch) are only read. With `probes`, steps of groups of at most
        `most` members are measured on `device`. A step is profiled for `profiled` trials; 0: no profile.
        """
        fusion = self._joined(task, built, prepared, leaves, library, device, most=most, probes=probes)
        if probes and prepared.is_checked:
            fusion = self._with_plans(fusion, task, built, prepared, leaves, library, device, most)
        if not profiled:
            return fusion
        try:
            figures = self._figures.of(task, built, prepared, leaves, library, device, profiled)
        except UnfusableError as error:
            return replace(fusion, why_no_figures=str(error))
        except Exception as error:  # a task without a profile still has a forecast
            _LOGGER.info("a step cannot be profiled", exc_info=True)
            return replace(fusion, why_no_figures=f"profiling its step has failed with {type(error).__name__}: {error}")
        return replace(fusion, figures=figures)

    def _with_plans(
        self,
        found: FusionForecast,
        task: TrainTask,
        built: tuple[nn.Module, torch.optim.Optimizer],
        prepared: PreparedPlan,
        leaves: BatchLeaves,
        library: PlanLibrary,
        device: Device,
        most: int,
    ) -> FusionForecast:
        """Add the forecast of planned steps for more members than a device has room for."""
        room = min(most, self._budget_bytes // prepared.plan.peak_bytes)
        if not 1 <= room < most:
            return found
        if device.torch_device.type != "cpu":
            return replace(found, why_not_planned="the time of planned steps is predicted on CPU devices alone")
        stand, plans = host_of([device]), GroupPlanFactory(library)
        planner = StepPlanner(self._budget_bytes, library.budget.alignment, lambda: (stand,))

        def stack(begin: int, end: int) -> StackedStepSpec:
            size, is_clipped = end - begin, task.max_grad_norm is not None
            return stack_of(plans.stacked(prepared, size), [built] * size, leaves.tensors, is_clipped=is_clipped)

        try:
            check_planned(task, prepared)
            key = (fusion_key(task, *built), leaves.signature, most, task.max_grad_norm is None)
            if key not in self._planned:
                unplanned_way = kept_way(planner, stack(0, room))
                self._planned[key] = compared(planner, stack, most, unplanned_way, most, insists=False, least_gain=1.0)
        except (UnfusableError, BudgetError) as error:
            return replace(found, why_not_planned=str(error))
        except Exception as error:  # the task runs anyway, without planned steps
            _LOGGER.info("a step cannot be planned", exc_info=True)
            return replace(found, why_not_planned=f"planning its step has failed with {type(error).__name__}: {error}")
        return replace(found, planned=self._planned[key])

    def _joined(
        self,
        task: TrainTask,
        built: tuple[nn.Module, torch.optim.Optimizer],
        prepared: PreparedPlan,
        leaves: BatchLeaves,
        library: PlanLibrary,
        device: Device,
        *,
        most: int,
        probes: bool,
    ) -> FusionForecast:
        module, optimizer = built
        try:
            key = (fusion_key(task, module, optimizer), leaves.signature)
            check_updates(prepared)
            room = room_for(prepared, self._budget_bytes, most)
            GroupPlanFactory(library).stacked(prepared, room)
        except UnfusableError as error:
            return FusionForecast(group=None, why_alone=str(error))
        number = self._numbers.setdefault(key, len(self._numbers))
        if not probes or not prepared.is_checked:
            return FusionForecast(group=number, room=room)
        bench = FusionBenchmark(task, module, leaves.rebuild(leaves.tensors), library, device)
        try:
            timing = self._timings[key] = self._timed(self._timings.get(key), bench, library, room)
        except Exception as error:  # a task that cannot be measured still has a forecast
            _LOGGER.info("steps cannot be timed", exc_info=True)
            return FusionForecast(group=number, room=room, told=f"cannot be timed: {type(error).__name__}: {error}")
        size = chosen_size(timing, room, _MANY)
        return FusionForecast(
            group=number,
            room=room,
            alone_seconds=timing.alone_seconds,
            drawing_seconds=timing.drawing_seconds,
            group_seconds=dict(timing.group_seconds),
            size=size,
            told=why(timing, size, room),
        )

    @staticmethod
    def _timed(
        timing: FusionStepTimes | None, bench: FusionBenchmark, library: PlanLibrary, room: int
    ) -> FusionStepTimes:
        if timing is not None and any(timing.gain(size) is not None for size in sizes(room)):
            return timing
        timing = timing or timed_alone(bench)
        plans = UntracedPlanFactory(library)
        while (size := next_size(timing, room, _MANY)) is not None:
            timing = timing.with_size(size, bench.together(size, plans))
        return timing


def refused(task: TrainTask) -> FusionForecast | None:
    """Return the forecast of a task that is unfusable by its own settings; None: the settings allow fusion."""
    try:
        check_task(task)
    except UnfusableError as error:
        return FusionForecast(group=None, why_alone=str(error), why_no_figures=str(error))
    return None
