"""Units of a group's batches: where a single trial has a number, such as a loss, a group has N.

`GroupExecutor` (`group_executor.py`) makes a `GroupStep` for each training step and a `GroupEvaluation` for each
evaluated batch, unless a round (`multi_step_unit.py`) runs the batch. `SlotTable` (`slot_table.py`) makes the
`GroupGradients`, which rounds and planned steps (`fusion/runtime/`) use too. A single thread at a time runs a group, so no
lock is taken.

Note: masks. Results of resting slots are computed and dropped by selecting rows, never by a product with zero, because
zero times NaN is NaN. A member whose loss, or scaled gradient, is not finite takes no step, and must not stop the others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from hydra_tune.batched.batched_optimizer import StackedOptimizer
from hydra_tune.batched.gradient_clipping import clip_, factors_of, norms_of
from hydra_tune.devices.device import Device, RandomGenerator
from hydra_tune.fusion.compile.batched_plan import SummedLosses
from hydra_tune.fusion.compile.cuda_graph_steps import CapturedPlanExecutor
from hydra_tune.fusion.group.group_rng import GroupStreams
from hydra_tune.shard.capture.step_module import Objective, on_host
from hydra_tune.shard.execute.chain import earlier_gradient_key, parameter_gradient_key
from hydra_tune.shard.partition.plan import Shard
from hydra_tune.task import TrainTask
from hydra_tune.train.loop.batch_units import BatchUnits, EvaluationBatch, PendingUnit
from hydra_tune.train.loop.gradient_rules import GradientProcessor, check_unscalable, inverse_of
from hydra_tune.train.loop.optimizer_step import OptimizerStep
from hydra_tune.train.loop.training_batch import BatchPart, TrainingBatch


class GroupGradients(GradientProcessor):
    """Gradient rules of a group: a separate loss, loss scale and clipping norm for every member.

    A member's loss scale stays in the member's own rules, so that its checkpoints hold the scale, and the member takes the
    scale along where it joins or leaves.

    Args:
        members: task and own rules of each member; a member without clipping keeps its gradients unchanged.
    """

    def __init__(self, members: Sequence[tuple[TrainTask, GradientProcessor]]) -> None:
        tasks = [task for task, _ in members]
        # The base class takes norms only for a task that clips, so
        # pass any such task; `limits` holds the members' own norms.
        super().__init__(next((task for task in tasks if task.max_grad_norm is not None), tasks[0]))
        self._limits = [task.max_grad_norm for task in tasks]
        self._own = [rules for _, rules in members]
        self._member_norms: dict[str, Tensor] = {}
        self._overflowed = torch.zeros(len(members), dtype=torch.bool, device="cpu")
        self._stepping: list[bool] = []
        self._optimizer: StackedOptimizer | None = None  # which leaves members out of this step

    def replace(self, index: int, task: TrainTask, rules: GradientProcessor) -> None:
        """Give a slot to another member."""
        self._limits[index], self._own[index] = task.max_grad_norm, rules
        assert task.max_grad_norm is None or self.clips, "a group that does not clip admits nobody who does"

    @property
    def clips(self) -> bool:
        """Whether a member clipped gradients when the slots were made, so that steps take norms."""
        return self._max_norm is not None

    @property
    def limits(self) -> Tensor:
        """Clipping norms of the members: (members,), float64, on the host; infinity for members without clipping."""
        return torch.tensor(
            [math.inf if limit is None else limit for limit in self._limits], dtype=torch.float64, device="cpu"
        )

    @property
    def scales(self) -> Tensor | None:
        """The members' loss scales: (members,), on the host; None if losses are not scaled."""
        scales = [rules.scale for rules in self._own]
        return None if self.is_plain else torch.stack([scale for scale in scales if scale is not None])

    def objective(self, share: float) -> Objective:
        """Return the sum of the members' losses."""
        assert share == 1.0, "a group takes batches whole"
        return SummedLosses(self.divisor, self.scales)

    def leave_out_overflowed(self, optimizer: Optimizer) -> None:
        """Exclude members from the step whose scaled gradients, all complete now, are not finite."""
        if self.is_plain:
            return
        assert isinstance(optimizer, StackedOptimizer), "not a group's state"
        self._optimizer, self._stepping = optimizer, list(optimizer.active)
        optimizer.active = [
            active and not overflowed
            for active, overflowed in zip(optimizer.active, self._overflowed.tolist(), strict=True)
        ]

    def clip(self, parameters: Sequence[Tensor], order: Sequence[str]) -> None:
        """As of `GradientProcessor`, separately for every member."""
        if self._max_norm is None:
            return
        norms = [self._member_norms[name] for name in order if name in self._member_norms]
        factors = factors_of(norms, self.limits)
        for parameter in parameters:
            assert parameter.grad is not None
            clip_(parameter.grad, factors)

    def next_step(self) -> None:
        """Finish the step; the loss scales of the members that made the step adapt."""
        if self._optimizer is not None:
            self._optimizer.active = list(self._stepping)  # a unit may go on with the next step
            for rules, overflowed, stepping in zip(self._own, self._overflowed.tolist(), self._stepping, strict=True):
                # A vacant slot has the rules of a member in another slot.
                if stepping:
                    rules.adapt_scale(overflowed=overflowed)
            self._optimizer = None
            self._overflowed.fill_(False)
        self._member_norms.clear()

    def _take_norms(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients:
            return
        norms = [norms_of(gradient) for gradient in gradients.values()]
        for name, member_norms in zip(gradients, torch.stack(norms).cpu(), strict=True):  # a single wait for a GPU
            self._member_norms[name] = member_norms

    def _unscale(self, gradients: Mapping[str, Tensor], scale: Tensor) -> None:
        """As of `GradientProcessor`, by each member's own scale."""
        del scale
        check_unscalable(gradients)
        filled = [gradient for gradient in gradients.values() if gradient.numel()]
        scales = self.scales
        if not filled or scales is None:
            return
        inverse = inverse_of(scales)
        # Before the product, as torch's kernel.
        largest = [
            torch.linalg.vector_norm(gradient.reshape(len(scales), -1), math.inf, 1).double() for gradient in filled
        ]
        for gradient in filled:
            gradient.mul_(inverse.to(gradient).view(-1, *[1] * (gradient.dim() - 1)))
        self._overflowed |= ~torch.stack(largest).isfinite().all(0).cpu()  # a single wait for a GPU


def leave_out_bad(optimizer: Optimizer, losses: Sequence[float]) -> None:
    """Exclude members without a finite loss from the step."""
    assert isinstance(optimizer, StackedOptimizer), "not a group's state"
    finite = map(math.isfinite, losses)
    optimizer.active = [active and good for active, good in zip(optimizer.active, finite, strict=True)]


class _MaskedBatchUnits(BatchUnits):
    """Units that leave the buffers of resting members unchanged."""

    resting: Sequence[int] = ()

    def _generator(self, device: Device) -> RandomGenerator:
        assert isinstance(self._streams, GroupStreams), "not a group's streams"
        return self._streams.generator_on(device)

    def _shard_unit(self, kind: str, index: int, compute: Callable[[Device], None]) -> PendingUnit:
        return super()._shard_unit(kind, index, partial(self._compute, index, compute))

    def _compute(self, index: int, compute: Callable[[Device], None], device: Device) -> None:
        with self._buffers_kept(index):
            compute(device)

    @contextmanager
    def _buffers_kept(self, index: int) -> Iterator[None]:
        names = self._plan.shards[index].graph.written_state if self.resting else ()
        tensors = self._store.state(names)
        rows = torch.tensor(list(self.resting))
        # Indexing with a tensor copies the rows, so the saved rows are safe from in-place writes.
        saved_rows = [tensor.detach()[rows.to(tensor.device)] for tensor in tensors]
        # Without `finally`: the undo of a failed unit restores all rows (`unit_rollback.py`).
        yield
        # No overwrite for autograd: a graph that is kept until the backward reads nothing of resting members.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
            for tensor, rows_before in zip(tensors, saved_rows, strict=True):
                tensor[rows.to(tensor.device)] = rows_before


class GroupBatch(_MaskedBatchUnits, TrainingBatch):
    """A batch of each member. After the units have run, `losses` holds the members' training losses."""

    losses: list[float]
    holding: Sequence[int] = ()

    def _surroundings(self, shard: Shard, device: Device, draws: str) -> AbstractContextManager[object]:
        """As of `BatchUnits`.

        A recorded or replayed step takes the generator's turn, and waits for the turn before the capture gate.
        """
        stack = ExitStack()
        if isinstance(self._plan.computing, CapturedPlanExecutor):
            stack.enter_context(device.generator.in_turn())
        stack.enter_context(super()._surroundings(shard, device, draws))
        return stack

    def _backward(self, index: int, completes: bool, device: Device) -> None:
        """As of `TrainingBatch`; members in `holding` keep their gradients."""
        computing = self._plan.computing
        if isinstance(computing, CapturedPlanExecutor):
            computing.lease = self._store.lease
        names = self._plan.shards[index].trained if self.holding else ()
        earlier = {name: self._store.get(earlier_gradient_key(name)) for name in names}
        # The backward accumulates into the earlier gradients, also for slots that computed
        # on another member's batch. Indexing with a list copies the rows that must survive.
        rows = list(self.holding)
        saved_rows = {name: gradient[rows] for name, gradient in earlier.items() if gradient is not None}
        super()._backward(index, completes, device)
        for name in names:
            gradient = self._store.get(parameter_gradient_key(name))
            if gradient is not None:
                gradient[rows] = saved_rows.get(name, gradient.new_zeros(()))
                self._store.changed(parameter_gradient_key(name))

    def _take_loss(self, loss: Tensor) -> None:
        """Exclude members without a finite loss from the step."""
        self.losses = loss.tolist()
        self.loss = 0.0  # finite: a bad member fails in its own loop, not the whole group
        leave_out_bad(self._state.optimizer, self.losses)


def member_values(value: Tensor, *, collects: bool) -> Sequence[Any]:
    """Return a stacked value of a metric for each member: a number, or a tensor on the host for `finish=`."""
    return on_host(value).unbind() if collects else value.tolist()


class GroupEvaluation(_MaskedBatchUnits, EvaluationBatch):
    """An evaluated batch of each member. After the units have run, `values` holds the members' values by metric."""

    def _take_metric(self, metric: str, value: Tensor) -> None:
        if not hasattr(self, "values"):
            self.values: dict[str, Sequence[Any]] = {}
        self.values[metric] = member_values(value, collects=self.collects)


class GroupStep(OptimizerStep):
    """An optimizer step of a group on its members' batches.

    Attributes:
        resting: slots of members that take no part in the next batch.
        holding: slots of resting members that keep their gradients from earlier batches of the step, if any.
    """

    resting: Sequence[int] = ()
    holding: Sequence[int] = ()

    @property
    def member_losses(self) -> list[float]:
        """The training loss of each member; arbitrary for resting members."""
        assert isinstance(self._batch, GroupBatch), "no batch has run"
        return self._batch.losses

    def _takes_step(self) -> bool:
        """As of `OptimizerStep`; members whose gradients are not finite take no step."""
        assert isinstance(self._gradients, GroupGradients), "not a group's step"
        self._gradients.leave_out_overflowed(self._state.optimizer)
        return True

    def _batch_of(self, part: BatchPart) -> TrainingBatch:
        batch = GroupBatch(part, self._state, self._streams, self._device, self._gradients)
        batch.resting, batch.holding = self.resting, self.holding
        return batch
