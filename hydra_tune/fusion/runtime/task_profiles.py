"""Groups of trials that are all like a given task, traced and profiled from the task's own plan, without training.

A task whose steps cannot be planned is refused here, with the reason. `StepProfileCache` (`pool/dry_run/step_profiles.py`)
makes a `TaskProfileCache` for each kind of task, and number of trials, that `HydraExecutor.plan(profile=...)` forecasts.
`check_planned` (`step_planner.py`) calls `check_plannable` before the steps of a group are planned, and `StepPlanner`
(`step_planner.py`) calls `check_unscaled` for each step that the planner traces. The planner calls such a group a sub-array.

Note: the task's module and optimizer are only read. Tracing holds the capture gate alone, and profiling shares the gate. A
`TaskProfileCache` takes no lock, because one thread alone uses the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory, check_updates
from hydra_tune.fusion.matching.fusion_key import check_task
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.profile.output_layouts import as_laid_out
from hydra_tune.planner.profile.profiler import SubArrayProfiler
from hydra_tune.planner.trace.optimizer_graph import UpdateTracer
from hydra_tune.planner.trace.step_graph import StepGraph, step_graph
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.task import Precision, TrainTask


def check_plannable(task: TrainTask, prepared: PreparedPlan) -> None:
    """Refuse a task whose steps cannot be planned.

    Raises:
        UnfusableError: with the reason.
    """
    check_task(task)
    plan = prepared.plan
    if plan.eager:
        why = f" ({plan.why_eager})" if plan.why_eager else ""
        raise UnfusableError(
            f"its model runs whole{why}: there is no graph of it that could be planned; it runs unplanned"
        )
    check_updates(prepared)
    check_unscaled(task.precision)
    if task.accumulate > 1:
        raise UnfusableError(
            f"its steps are of several batches (accumulate={task.accumulate}), and plans are made of steps of one; it runs "
            "unplanned"
        )
    if len(plan.shards) > 1:
        raise UnfusableError(
            f"its step is cut into {len(plan.shards)} shards, and plans are made of steps in one; it runs unplanned. "
            "Where the device has room for one trial in one shard, it can be planned"
        )


def check_unscaled(precision: Precision) -> None:
    """Refuse a precision whose losses are scaled: no planned step follows the members' scales.

    Raises:
        UnfusableError: as said.
    """
    if precision == "float16":
        raise UnfusableError(
            "it has precision='float16', whose loss scales no planned step follows; it runs unplanned. "
            "precision='bfloat16' needs none"
        )


class TaskProfileCache:
    """Sub-arrays of a task's kind, by size: each step is traced on first use, and `SubArrayProfiler` keeps the measurements.

    Args:
        built: the trial's module and optimizer; only read.
        leaves: the trial's first batch; only the geometry is read.

    Raises:
        UnfusableError: the task cannot be planned; with the reason.
    """

    def __init__(
        self,
        task: TrainTask,
        built: tuple[nn.Module, Optimizer],
        prepared: PreparedPlan,
        leaves: BatchLeaves,
        library: PlanLibrary,
        profiles: SubArrayProfiler,
        device: torch.device,
    ) -> None:
        check_plannable(task, prepared)
        module, self._optimizer = built
        self._prepared, self._inputs = prepared, leaves.tensors
        self._plans, self._profiles, self._device = GroupPlanFactory(library), profiles, device
        self._state = dict(named_state(module))
        # Optimizers know parameters as objects, and plans know them by name.
        names = {id(tensor): name for name, tensor in self._state.items()}
        self._groups = {
            names[id(parameter)]: number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        self._is_clipped = task.max_grad_norm is not None
        self._steps: dict[int, StepGraph] = {}

    def step(self, size: int) -> StepGraph:
        """Return the graph of a step of so many trials.

        Raises:
            UnfusableError: the step cannot be traced; the message names the obstacle.
        """
        if size not in self._steps:
            # Tracing changes the state of the whole process, so no trial may compute meanwhile.
            with GATE.exclusive():
                traced = self._traced(size)
            self._steps[size] = as_laid_out(traced, self._device)
        return self._steps[size]

    def array(self, size: int) -> SubArrayProfile:
        """Return the profiled sub-array of so many trials.

        Raises:
            UnfusableError: as `step`.
        """
        step = self.step(size)
        # Many threads may compute at once; a capture holds the gate alone, and changes how operators run.
        with GATE.shared():
            return self._profiles.array(f"{size} trials", step, self._device)

    def _traced(self, size: int) -> StepGraph:
        plan = self._plans.stacked(self._prepared, size).plan
        (shard,) = plan.shards
        graph = shard.graph
        operands = ShardOperands(
            state=self._stacked(size, [self._state[name] for name in graph.state]),
            constants=[plan.constants[name] for name in graph.constants],
            inputs=self._stacked(size, [self._inputs[place] for place in graph.inputs]),
            live_in=(),
        )
        trains = [self._state[name].requires_grad for name in graph.state]
        # The tracer only reads the options, so the task's own optimizer stands for those of all members.
        tracer = UpdateTracer([self._optimizer] * size)
        # The operands lie on the CPU, but operators may decompose differently on the device.
        place = None if self._device.type == "cpu" else self._device
        return step_graph(
            graph.module,
            list(graph.state),
            operands,
            trains,
            size,
            tracer,
            self._groups,
            place,
            is_clipped=self._is_clipped,
        )

    def _stacked(self, size: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the stacked geometry; nobody writes to their bytes, so they take no memory."""
        return [torch.empty((size, *tensor.shape), dtype=tensor.dtype, device="cpu") for tensor in tensors]
