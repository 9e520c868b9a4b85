"""Plans for groups whose steps do not fit a device: what of their activations is swapped or computed again, by the planner.

Knows plans of groups and geometry of tensors; what runs is `planned_round.py`.
"""

import logging
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.fusion.planner.layouts import as_laid_out
from hydra_tune.fusion.planner.portfolio import MARGIN, Part, Planner
from hydra_tune.fusion.planner.profiler import CpuClock, Profiles
from hydra_tune.fusion.planner.step_graph import StepGraph, step_graph
from hydra_tune.fusion.planner.updates import UpdateTracer
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.capture import named_state
from hydra_tune.shard.compute import Operands
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.library import Prepared

_LOGGER = logging.getLogger("hydra_tune.fusion")
CLIPS = "gradients are clipped by the norm of all of them (max_grad_norm), and planned steps update as they go"
_MAX_KEPT = 8  # plans of one stacked step


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a group computes on; only the geometry of its tensors counts.

    Attributes:
        prepared: the group's plan.
        state: its stacked parameters and buffers by name.
        inputs: its stacked batch.
        groups: parameter -> its parameter group, of those that are trained.
        updates: of its members' optimizers.
    """

    prepared: Prepared
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    groups: Mapping[str, int]
    updates: UpdateTracer

    @property
    def key(self) -> Hashable:
        """Stacks of one plan with equal keys have the same step."""
        tensors = (*self.state.values(), *self.inputs)
        geometry = tuple((one.dtype, one.shape, one.stride(), one.requires_grad) for one in tensors)
        return geometry, tuple(self.groups.items()), self.updates.key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStep:
    """A step of a group within a device's memory.

    Attributes:
        graph: of it.
        part: how it is run.
        limit_bytes: that it was planned for, as of `Planner`.
    """

    graph: StepGraph
    part: Part
    limit_bytes: int

    @property
    def host_bytes(self) -> int:
        """Host memory for what is swapped."""
        (array,), (decisions,) = self.part.schedule.arrays, self.part.schedule.decisions
        return sum(array.sizes[name] for name in decisions.swaps)

    @property
    def workspace_bytes(self) -> int:
        """Memory beside parameters, buffers and optimizer state, the batch counted."""
        held = [*self.graph.state.values(), *self.graph.moments.values()]
        spare = int(MARGIN * self.limit_bytes)
        return self.part.peak_bytes + spare - sum(self.graph.geometry[name].nbytes for name in held)

    def __str__(self) -> str:
        swaps, again = (len(one) for one in _decided(self.part))
        (size,) = self.part.sizes
        return (
            f"a step of {size} together takes {self.part.times.seconds * 1e3:.3g} ms and "
            f"{format_bytes(self.part.peak_bytes)} at once, with {swaps} activations swapped and {again} computed again"
        )


def _decided(part: Part) -> tuple[Mapping[str, int], Mapping[str, object]]:
    (decisions,) = part.schedule.decisions
    return decisions.swaps, decisions.recomputes


class StepPlanner:
    """Plans steps for the devices of a pool, and keeps the plans. Any thread may ask.

    Args:
        budget_bytes: memory of the smallest device.
        alignment: bytes to which they align allocations.
    """

    def __init__(self, budget_bytes: int, alignment: int) -> None:
        self.budget_bytes = budget_bytes
        self._alignment = alignment
        self._lock = threading.Lock()
        self._making = threading.Lock()  # one plan at a time, for their profiles would disturb each other
        self._graphs: WeakKeyDictionary[Prepared, dict[Hashable, StepGraph]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Prepared, dict[Hashable, PlannedStep | Exception]] = WeakKeyDictionary()
        self._profiles = Profiles(lambda _: CpuClock(time.thread_time))

    def fits(self, prepared: Prepared) -> bool:
        """Whether a group's step needs no plan."""
        return prepared.plan.peak_bytes <= self.budget_bytes

    def planned(self, stack: Stack) -> PlannedStep:
        """The step of a group, planned for the memory of a device.

        Args:
            stack: the group.

        Raises:
            UnfusableError: it cannot be planned; with the reason.
            BudgetError: no plan needs so little memory.
        """
        with self._making:
            known, key = self._known.setdefault(stack.prepared, {}), stack.key
            if key not in known:
                if len(known) >= _MAX_KEPT:
                    known.clear()
                try:
                    known[key] = self._planned(stack)
                except (UnfusableError, BudgetError) as error:
                    known[key] = error
                except Exception as error:  # what runs without a plan must not fail for want of one
                    _LOGGER.info("a step cannot be planned", exc_info=True)
                    known[key] = UnfusableError(f"planning has failed with {type(error).__name__}: {error}")
            found = known[key]
        if isinstance(found, Exception):
            raise found
        return found

    def kept_seconds(self, stack: Stack) -> float:
        """What a step takes that needs no plan.

        Raises:
            UnfusableError: it cannot be traced as planned steps are.
        """
        with self._making:
            graph = self._graph(stack)
            planner, _ = self._planner(graph)
            return planner.kept(stack.updates.count).times.seconds

    def _planned(self, stack: Stack) -> PlannedStep:
        graph = self._graph(stack)
        planner, limit_bytes = self._planner(graph)
        part = planner.alone(stack.updates.count)
        found = PlannedStep(graph=graph, part=part, limit_bytes=limit_bytes)
        if part.peak_bytes > limit_bytes * (1 - MARGIN):
            raise BudgetError(
                f"no plan of {stack.updates.count} fused trials needs less than {format_bytes(part.peak_bytes)} at once, and "
                f"a device has {format_bytes(limit_bytes)} for them; give it more memory, or fuse fewer",
                enough_bytes=part.peak_bytes,
            )
        _LOGGER.debug("planned: %s", found)
        return found

    def _planner(self, graph: StepGraph) -> tuple[Planner, int]:
        device = next(iter(graph.geometry.values())).device
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # this thread's, as devices compute
        try:
            with GATE.shared():
                array = self._profiles.array("group", graph, device)
        finally:
            torch.set_num_threads(threads)
        # Each tensor of the group's state lies by itself, which takes so much more.
        slack = self._alignment * (len(graph.state) + len(graph.moments))
        limit_bytes = max(0, self.budget_bytes - slack)
        return Planner(array=lambda _: array, limit_bytes=limit_bytes, is_duplex=device.type != "cpu"), limit_bytes

    def _graph(self, stack: Stack) -> StepGraph:
        known, key = self._graphs.setdefault(stack.prepared, {}), stack.key
        if key not in known:
            if len(known) >= _MAX_KEPT:
                known.clear()
            known[key] = self._traced(stack)
        return known[key]

    def _traced(self, stack: Stack) -> StepGraph:
        plan = stack.prepared.plan
        if plan.mode != "train" or len(plan.shards) > 1:
            raise UnfusableError("steps of several shards are not planned; it runs unplanned")
        graph = plan.shards[0].graph
        operands = Operands(
            state=[stack.state[name] for name in graph.state],
            constants=[plan.constants[name] for name in graph.constants],
            inputs=[stack.inputs[index] for index in graph.inputs],
            live_in=(),
        )
        trains = [tensor.requires_grad for tensor in operands.state]
        with GATE.exclusive():
            try:
                found = step_graph(
                    graph.module, graph.state, operands, trains, stack.updates.count, stack.updates, dict(stack.groups)
                )
            except UnfusableError:
                raise
            except Exception as error:
                raise UnfusableError(
                    f"its step cannot be traced as one graph ({type(error).__name__}: {error}); it runs unplanned"
                ) from error
        if not updated(found) <= stack.groups.keys():
            raise UnfusableError("it overwrites buffers after its loss; it runs unplanned")
        return as_laid_out(found, next(iter(found.geometry.values())).device)


def stack_of(prepared: Prepared, built: Sequence[tuple[nn.Module, Optimizer]], inputs: Sequence[Tensor]) -> Stack:
    """What a group of trials would compute on.

    Args:
        prepared: the group's plan.
        built: modules and optimizers of the members; only read.
        inputs: the batch of one of them.

    Raises:
        UnfusableError: their optimizers have no form for all members at once.
    """
    first, optimizer = built[0]
    size = len(built)
    return Stack(
        prepared=prepared,
        state={name: _stacked(tensor, size) for name, tensor in named_state(first)},
        inputs=[_stacked(tensor, size) for tensor in inputs],
        groups=groups_of(first, optimizer),
        updates=UpdateTracer([own for _, own in built]),
    )


def updated(graph: StepGraph) -> frozenset[str]:
    """The parameters and buffers that a step overwrites after its losses: those that are trained.

    Args:
        graph: of the step.
    """
    names = {argument: name for name, argument in graph.state.items()}
    written = {storage for node in graph.ops[graph.num_forward :] for storage in graph.seen.writes[node.name]}
    return frozenset(names[storage] for storage in written if storage in names)


def groups_of(module: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """The number of the parameter group of each parameter that an optimizer has.

    Args:
        module: whose parameters.
        optimizer: of them.
    """
    names = {id(tensor): name for name, tensor in named_state(module)}
    return {names[id(p)]: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _stacked(tensor: Tensor, size: int) -> Tensor:
    """Memory of the geometry that a stacked tensor has, whatever is in it."""
    made = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)
