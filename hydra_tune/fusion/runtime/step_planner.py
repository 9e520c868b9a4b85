"""`StepPlanner`: plan group steps that exceed a device's memory; the planner chooses swap and recompute of activations.

The module knows groups' plans and the geometry of tensors, and must not know running groups. The planner alone decides on
swaps. `GroupJobLauncher` (`pool/fusion/group_jobs.py`) makes a pool's planner, and a dry run
(`pool/dry_run/fusion_report.py`) makes another. `PlannedSizeChooser` (`planned_group_size.py`) asks for plans before a
group is formed; `PlannedStepCache` (`planned_unit.py`) asks before the first step of a kind, and before a group changes
its size; `PairTrial` (`pair_trial.py`) asks for the merged steps of two groups. `planned_executor.py` and
`paired_unit.py` run a `PlannedStep`. `StepPlanAutotuner` (`plan_autotuner.py`) has `replanned` correct a plan, and the
matcher (`pool/fusion/group_matcher.py`) calls `check_planned`. `pool/dry_run/step_profiles.py` uses `clock_of`.

Note: locks. One plan is made at a time (`_making`), because concurrent profiles would disturb each other. Tracing holds
the capture gate alone. Profiling borrows a device and then shares the gate, and laying out a step borrows a device,
too. So no caller may hold the pool's lock or the gate.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.errors import BudgetError, HydraTuneError, UnfusableError
from hydra_tune.fusion.runtime.profiling_device import HOST, ProfilingDevice
from hydra_tune.fusion.runtime.task_profiles import check_plannable, check_unscaled
from hydra_tune.planner.cost.peak_memory import simulated
from hydra_tune.planner.ir.step_profile import SubArrayProfile
from hydra_tune.planner.profile.allocator_rounding import allocated, on_all
from hydra_tune.planner.profile.output_layouts import as_laid_out
from hydra_tune.planner.profile.profiler import CpuClock, CudaClock, SubArrayProfiler, over_link
from hydra_tune.planner.profile.profiling_interpreter import ProfilingClock
from hydra_tune.planner.search.autotune import key_of, operator_ratio, slowed
from hydra_tune.planner.search.portfolio import MARGIN, Planner, PortfolioPlan, SubArrayPlan, limit_for
from hydra_tune.planner.trace.optimizer_graph import UpdateTracer
from hydra_tune.planner.trace.step_graph import StepGraph, step_graph
from hydra_tune.quantities import format_bytes, format_short_seconds
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.partition.plan_cache import PreparedPlan
from hydra_tune.task import TrainTask

_LOGGER = logging.getLogger("hydra_tune.fusion")
OWN_LOSSES = "their losses are not the same, for which no steps are planned"
_MAX_KEPT = 8  # step graphs of each group plan, and planned steps likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedStepSpec:
    """Tensors that a group computes on; only the geometry counts.

    Attributes:
        groups: parameter group number of every trained parameter, by name.
    """

    prepared: PreparedPlan
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    groups: Mapping[str, int]
    updates: UpdateTracer
    is_clipped: bool = False

    @property
    def key(self) -> Hashable:
        """Hashable key; stacks of the same plan with equal keys have the same step."""
        tensors = (*self.state.values(), *self.inputs)
        geometry = tuple((tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors)
        return geometry, tuple(self.groups.items()), self.updates.key, self.is_clipped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStep:
    """A planned step of a group, or of two groups that take turns, within a device's memory.

    Attributes:
        limit_bytes: memory limit of the plan, as of `Planner`.
    """

    graphs: tuple[StepGraph, ...]
    part: SubArrayPlan
    limit_bytes: int

    @property
    def host_bytes(self) -> int:
        """Host memory for swapped tensors, in bytes."""
        schedule = self.part.schedule
        pairs = zip(schedule.arrays, schedule.decisions, strict=True)
        return sum(array.sizes[name] for array, decisions in pairs for name in decisions.swaps)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step, in bytes, including first forwards and last backwards."""
        schedule = self.part.schedule
        return max(self.part.peak_bytes, *(simulated(schedule, segment).peak_bytes for segment in schedule.ends))

    @property
    def workspace_bytes(self) -> int:
        """Memory beside parameters, buffers and optimizer state, in bytes, including the batches and a spare share."""
        state_arguments = [
            (graph, name) for graph in self.graphs for name in (*graph.state.values(), *graph.moments.values())
        ]
        spare = int(MARGIN * self.limit_bytes)
        return self.peak_bytes + spare - sum(graph.geometry[name].nbytes for graph, name in state_arguments)

    def __str__(self) -> str:
        all_decisions = self.part.schedule.decisions
        swaps, recomputations = (
            sum(len(decisions.swaps) for decisions in all_decisions),
            sum(len(decisions.recomputes) for decisions in all_decisions),
        )
        sizes = " and ".join(map(str, self.part.sizes))
        return (
            f"a step of {sizes} {'together' if len(self.graphs) == 1 else 'in turn'} takes "
            f"{format_short_seconds(self.part.times.seconds)} and "
            f"{format_bytes(self.peak_bytes)} at once, with {swaps} activations swapped and {recomputations} computed again"
        )


class StepPlanner:
    """Plans steps for the devices of a pool and caches the plans. Thread-safe.

    Args:
        budget_bytes: memory of the smallest device.
        alignment: bytes to which the devices align allocations.
        stands: returns the present devices to profile on, one for each kind; the first stand's times count.
    """

    def __init__(
        self, budget_bytes: int, alignment: int, stands: Callable[[], Sequence[ProfilingDevice]] = lambda: (HOST,)
    ) -> None:
        self.budget_bytes = budget_bytes
        self._alignment = alignment
        self._stands = stands
        self._making = threading.Lock()  # a single plan at a time, because concurrent profiles would disturb each other
        self._graphs: WeakKeyDictionary[PreparedPlan, dict[Hashable, StepGraph]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[PreparedPlan, dict[Hashable, PlannedStep | Exception]] = WeakKeyDictionary()
        self._profiles = SubArrayProfiler(clock_of)

    def fits(self, prepared: PreparedPlan) -> bool:
        """Return whether a group's step fits a device without a plan."""
        return prepared.plan.peak_bytes <= self.budget_bytes

    def planned(self, *stacks: StackedStepSpec) -> PlannedStep:
        """Plan the step of a group, or of two groups that take turns, for the memory of a device.

        Args:
            stacks: the group, or two groups with the larger first.

        Raises:
            UnfusableError: the step cannot be planned; the message gives the reason.
            BudgetError: no plan fits the memory.
        """
        with self._making:
            first_plan = stacks[0].prepared
            # `first_plan` is the weak key of the cache entry, and a value
            # that refers to its own key would keep the entry alive.
            other_plans = tuple(stack.prepared for stack in stacks[1:] if stack.prepared is not first_plan)
            outcomes, key = self._known.setdefault(first_plan, {}), (other_plans, tuple(stack.key for stack in stacks))
            if key not in outcomes:
                if len(outcomes) >= _MAX_KEPT:
                    outcomes.clear()
                # Refusals are cached like plans, because finding out takes as long.
                try:
                    outcomes[key] = self._planned(stacks)
                except (UnfusableError, BudgetError) as error:
                    outcomes[key] = error
                except HydraTuneError as error:  # no free device to profile on; do not cache
                    raise UnfusableError(f"its step was not profiled: {error}") from error
                except Exception as error:  # planning is optional, and must not fail a trial that can run unplanned
                    _LOGGER.info("a step cannot be planned", exc_info=True)
                    traceback.clear_frames(error.__traceback__)  # frees a profile's device tensors
                    outcomes[key] = UnfusableError(f"planning has failed with {type(error).__name__}: {error}")
            outcome = outcomes[key]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def kept_seconds(self, stack: StackedStepSpec) -> float:
        """Return the predicted seconds of a step that needs no plan.

        Raises:
            UnfusableError: the step cannot be traced the way planned steps are.
        """
        with self._making:
            _, planner, _ = self._planner([self._graph(stack)])
            return planner.kept(stack.updates.count).times.seconds

    def profiled_seconds(self, stack: StackedStepSpec) -> float | None:
        """Return the seconds of the operators of a step that has been profiled; None for another step."""
        with self._making:
            graph = self._graphs.get(stack.prepared, {}).get(stack.key)
            if graph is None or not all(self._profiles.knows(graph, stand.place) for stand in self._stands()):
                return None
            (array,), _, _ = self._planner([graph])
            return array.seconds

    def _planned(self, stacks: Sequence[StackedStepSpec]) -> PlannedStep:
        graphs = tuple(self._graph(stack) for stack in stacks)
        counts = tuple(stack.updates.count for stack in stacks)
        arrays, planner, limit_bytes = self._planner(graphs)
        part = planner.best(planner.ways(counts, arrays))
        step = PlannedStep(graphs=graphs, part=part, limit_bytes=limit_bytes)
        if step.peak_bytes > limit_bytes * (1 - MARGIN):
            trials = "fused trials" if len(counts) == 1 else f"trials in two groups of {counts[0]} and {counts[1]}"
            raise BudgetError(
                f"no plan of {sum(counts)} {trials} needs less than {format_bytes(step.peak_bytes)} at once, and "
                f"a device has {format_bytes(limit_bytes)} for them; give it more memory, or fuse fewer",
                # The share of the budget that alignment may waste comes on top.
                enough_bytes=limit_for(step.peak_bytes) + self.budget_bytes - limit_bytes,
            )
        _LOGGER.debug("planned: %s", step)
        return step

    def replanned(self, step: PlannedStep, seconds: float) -> list[PlannedStep]:
        """Plan a step again, corrected by its measured time.

        Returns:
            The step with a corrected prediction, followed by all different ways to run the step that fit.
        """
        with self._making:
            ratio = operator_ratio(step.part, seconds)
            arrays = tuple(slowed(array, ratio) for array in step.part.schedule.arrays)
            planner = replace(self._planner(step.graphs)[1], array=lambda _: arrays[0])
            corrected_part = planner.timed(step.part, arrays)
            steps = {key_of(_member(step)): replace(step, part=corrected_part)}
            for part in planner.ways(step.part.sizes, arrays).values():
                other_step = replace(step, part=part)
                if other_step.peak_bytes <= step.limit_bytes * (1 - MARGIN):
                    steps.setdefault(key_of(_member(other_step)), other_step)
        return list(steps.values())

    def _planner(self, graphs: Sequence[StepGraph]) -> tuple[tuple[SubArrayProfile, ...], Planner, int]:
        """Return the graphs' profiles, a planner for the first graph, and the memory limit for all graphs together."""
        stands = self._stands()
        stand_profiles = [self._profiled(stand, graphs) for stand in stands]
        profiles = {id(graph): on_all([arrays[id(graph)] for arrays in stand_profiles]) for graph in graphs}
        arrays = tuple(profiles[id(graph)] for graph in graphs)
        # Every tensor of the groups' state is a separate allocation, and each may waste up to the alignment.
        slack = self._alignment * sum(len(graph.state) + len(graph.moments) for graph in graphs)
        limit_bytes = max(0, self.budget_bytes - slack)
        is_duplex = stands[0].place.type != "cpu"
        planner = Planner(array=lambda _: arrays[0], limit_bytes=limit_bytes, is_duplex=is_duplex)
        return arrays, planner, limit_bytes

    def _profiled(self, stand: ProfilingDevice, graphs: Sequence[StepGraph]) -> dict[int, SubArrayProfile]:
        """Return the graphs' profiles on a kind of device, by identity of the graph; measure on the first call."""
        is_known = all(self._profiles.knows(graph, stand.place) for graph in graphs)
        threads = torch.get_num_threads()
        with nullcontext() if is_known else stand.borrowed():
            torch.set_num_threads(1)  # devices compute with a single thread each, so profile the same way
            try:
                with GATE.shared():
                    profiles = {id(graph): self._profiles.array("group", graph, stand.place) for graph in graphs}
            finally:
                torch.set_num_threads(threads)
        if stand.bandwidth is not None:
            profiles = {key: over_link(array, stand.bandwidth) for key, array in profiles.items()}
        return {id(graph): allocated(profiles[id(graph)], graph, stand.rounding) for graph in graphs}

    def _graph(self, stack: StackedStepSpec) -> StepGraph:
        graphs, key = self._graphs.setdefault(stack.prepared, {}), stack.key
        # Tracing a step and laying the step out is slow, and predictions and pairs ask for the same graphs again.
        if key not in graphs:
            if len(graphs) >= _MAX_KEPT:
                graphs.clear()
            graphs[key] = self._traced(stack)
        return graphs[key]

    def _traced(self, stack: StackedStepSpec) -> StepGraph:
        plan = stack.prepared.plan
        if plan.mode != "train" or len(plan.shards) > 1:
            raise UnfusableError("steps of several shards are not planned; it runs unplanned")
        graph = plan.shards[0].graph
        check_unscaled(graph.precision)
        operands = ShardOperands(
            state=[stack.state[name] for name in graph.state],
            constants=[plan.constants[name] for name in graph.constants],
            inputs=[stack.inputs[index] for index in graph.inputs],
            live_in=(),
        )
        trains = [tensor.requires_grad for tensor in operands.state]
        stand = self._stands()[0]
        place = None if stand.place.type == "cpu" else stand.place
        # Tracing changes state of the whole process, so no trial may compute meanwhile.
        with GATE.exclusive():
            try:
                step = step_graph(
                    graph.module,
                    graph.state,
                    operands,
                    trains,
                    stack.updates.count,
                    stack.updates,
                    dict(stack.groups),
                    place,
                    is_clipped=stack.is_clipped,
                )
            except UnfusableError:
                raise
            except Exception as error:
                raise UnfusableError(
                    f"its step cannot be traced as one graph ({type(error).__name__}: {error}); it runs unplanned"
                ) from error
        if not updated(step) <= stack.groups.keys():
            raise UnfusableError("it overwrites buffers after its loss; it runs unplanned")
        # A profile on a device holds the static tensors there.
        if not stand.is_host:
            self._check_static(step)
        # Laying out runs operators on the device, which otherwise belongs to the pool.
        with stand.borrowed():
            return as_laid_out(step, stand.place)

    def _check_static(self, graph: StepGraph) -> None:
        """Refuse a step too large even for profiling on a device."""
        needed_bytes = sum(graph.seen.sizes[name] for name in graph.geometry)
        if needed_bytes > self.budget_bytes:
            raise BudgetError(
                f"parameters, optimizer state and batch of the fused trials take {format_bytes(needed_bytes)}, and a device "
                f"has {format_bytes(self.budget_bytes)} for them; give it more memory, or fuse fewer",
                enough_bytes=needed_bytes,
            )


def clock_of(device: torch.device) -> ProfilingClock:
    """Return the clock of a device; on the CPU the thread's CPU time, which excludes time taken by other threads."""
    return CudaClock(device) if device.type == "cuda" else CpuClock(time.thread_time)


def stack_of(
    prepared: PreparedPlan,
    built: Sequence[tuple[nn.Module, Optimizer]],
    inputs: Sequence[Tensor],
    *,
    is_clipped: bool,
) -> StackedStepSpec:
    """Return the stack that a group of trials would compute on.

    Raises:
        UnfusableError: the optimizers have no form for all members at once.
    """
    module, optimizer = built[0]
    size = len(built)
    return StackedStepSpec(
        prepared=prepared,
        state={name: _stacked(tensor, size) for name, tensor in named_state(module)},
        inputs=[_stacked(tensor, size) for tensor in inputs],
        groups=groups_of(module, optimizer),
        updates=UpdateTracer([member_optimizer for _, member_optimizer in built]),
        is_clipped=is_clipped,
    )


def check_planned(task: TrainTask, prepared: PreparedPlan) -> None:
    """Refuse a task whose kind no planned group supports.

    Raises:
        UnfusableError: the task is refused; the message gives the reason.
    """
    check_plannable(task, prepared)
    check_values(prepared)


def check_values(prepared: PreparedPlan) -> None:
    """Refuse a plan that is valid only for some batches.

    A planned unit makes several steps at once, and no check of the batches runs between the steps.

    Raises:
        UnfusableError: the plan depends on values of the batch.
    """
    if prepared.guard is not None:
        raise UnfusableError(
            "the step's Python asks for values of the batch, and a planned step is made for all batches of a kind; it runs "
            "unplanned"
        )


def _member(step: PlannedStep) -> PortfolioPlan:
    return PortfolioPlan(step.part.way, (step.part,), step.limit_bytes)


def updated(graph: StepGraph) -> frozenset[str]:
    """Return the parameters and buffers that a step overwrites after its losses; in a planned step, the trained parameters."""
    names = {argument: name for name, argument in graph.state.items()}
    written_storages = {storage for node in graph.ops[graph.num_forward :] for storage in graph.seen.writes[node.name]}
    return frozenset(names[storage] for storage in written_storages if storage in names)


def groups_of(module: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the parameter group number of every parameter of an optimizer, in the module's order."""
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: numbers[id(tensor)] for name, tensor in named_state(module) if id(tensor) in numbers}


def _stacked(tensor: Tensor, size: int) -> Tensor:
    stacked_tensor = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device="cpu")
    return stacked_tensor.requires_grad_(tensor.requires_grad)
