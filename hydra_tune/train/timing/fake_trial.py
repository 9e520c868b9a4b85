"""A trial's steps on tensors with sizes and no bytes: the same units, blocks and updates as in training, without numbers.

`pool/dry_run/report.py` makes `TrialRehearsal`s for each kind of task of a forecast, and `pool/dry_run/executor.py` runs the
units, both on the forecast's one thread and inside one `RehearsalFakeMode` (`shard/fake/fake_world.py`).

Note: the trial's own parts. Everything that decides the location of bytes is the code of a real run: plan, groups, the
store of values, the order of units, the optimizer, and the pager. So no second accounting can differ from the first. The
tensors are fakes (as in the pilot), and reading a value of a fake returns 1. A graph runs once in each situation
(`shard/fake/fake_memo.py`); the user's own code, for a model that runs whole, runs every time.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.memory.block import BlockKind
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.meta_models import bodiless_twin
from hydra_tune.shard.cost.update_pilot import stand_in_for
from hydra_tune.shard.execute.eager_plan import EagerStep
from hydra_tune.shard.fake.fake_memo import MemoizedShardExecutor
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.task import TrainTask
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.loop.optimizer_step import OptimizerStep
from hydra_tune.train.loop.plan_cache import CachedPlan
from hydra_tune.train.loop.training_batch import BatchPart
from hydra_tune.train.parallel import batch_grouping
from hydra_tune.train.parallel.cost_model import (
    CHOSEN_WAYS,
    GROUPED,
    DeviceOffer,
    fastest,
    on_one_device,
    shard_facts,
)
from hydra_tune.train.parallel.parallel_step import ParallelStep
from hydra_tune.train.parallel.pool_offers import StepStrategy
from hydra_tune.train.parallel.step_strategy import exact_ways
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.step_timing import StepTimes


class _FiniteGradientProcessor(GradientProcessor):
    """Gradients that are always finite, because fakes have no values."""

    def _unscale(self, gradients: Any, scale: Tensor) -> None:
        del gradients, scale


class TrialRehearsal:
    """A trial whose steps are rehearsed inside a `RehearsalFakeMode`.

    Args:
        module, optimizer: the trial's own, on the host; left unchanged.
        kept: plan of the trial's first batch.
        device: device for host memory; the trial may run on others like it.
        knows_length: whether the trial's data tells the number of steps.
        counts_draws: as of `ShardPlanConstraints`.

    Attributes:
        times: times of the trial's units, as the scheduler gets them.
        pace: measured times of the trial's steps; None if unknown.
    """

    def __init__(
        self,
        task: TrainTask,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        kept: CachedPlan,
        leaves: BatchLeaves,
        device: Device,
        *,
        knows_length: bool = True,
        counts_draws: bool = True,
    ) -> None:
        self.knows_length = knows_length
        self._counts_draws = counts_draws
        self.pace: StepTimes | None = None
        self._task = task
        self._device = device
        twin, stand_in = _doubles(module, optimizer)
        self._leaves = replace(leaves, tensors=tuple(_like(tensor) for tensor in leaves.tensors), copies=())
        self.plan = _plan(kept.plan, task, twin, self._leaves)
        self.times = kept.times
        self.num_parts = task.accumulate * task.num_pieces
        self.together = self._num_together(kept.plan)
        self.state = ModelState(twin, stand_in, self.plan, device)
        self._streams = RandomStreams(task.seed)
        self._gradients = _FiniteGradientProcessor(task)

    def keep_pace(self, pace: StepTimes) -> None:
        """Use measured times of the trial's steps."""
        self.pace, self.times = pace, pace.times

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        groups = self.state.groups(self.plan.used_state())
        return sum(group.size for group in groups if group.kind is BlockKind.PARAMETERS)

    def parallel_ways(self) -> list[str]:
        """Return the ways that give a step's batches the same bits on several devices; none for one batch, or unknown draws."""
        if self.num_parts == 1 or not self._knows_draws(self.plan):
            return []
        return [way for way in exact_ways(self.plan, self.state) if way in CHOSEN_WAYS.values()]

    def fastest_way(self, devices: Sequence[Device], link: LinkCostModel) -> tuple[str, float]:
        """Return the fastest way to run a step's batches on idle devices, and its time over that of one device."""
        offer = DeviceOffer(
            devices=tuple(device.name for device in devices),
            budget_bytes=min(device.budget_bytes for device in devices),
            bytes_per_second=link.bytes_per_second,
            most_devices=len(devices),
        )
        shards, is_grouped = shard_facts(self.plan, self.times), self.together > 1
        best = fastest(shards, self.num_parts, offer, [*self.parallel_ways(), *([GROUPED] if is_grouped else [])])
        return best.way, best.seconds / on_one_device(shards, self.num_parts, offer, grouped=is_grouped).seconds

    def steps(self, count: int) -> Generator[PendingUnit | None, None, None]:
        """Yield the units of `count` optimizer steps, and None after each step; then drop the state."""
        for _ in range(count):
            yield from self._step()
            yield None
        self.state.drop()

    def _num_together(self, plan: ShardPlan) -> int:
        """Return how many batches go through each shard together."""
        is_grouped = self._knows_draws(plan) and plan.may_be_pipelined and batch_grouping.is_worth_it(plan)
        return self.num_parts if is_grouped else 1

    def _knows_draws(self, plan: ShardPlan) -> bool:
        """As in `SingleTrial`: a batch joins others only where the number of its draws is known beforehand."""
        return self._counts_draws or not plan.is_stochastic

    def _step(self) -> Iterator[PendingUnit]:
        strategy = None
        if self.together > 1:
            strategy = StepStrategy(way=GROUPED, width=self.together, plan=self.plan)
        step = OptimizerStep(self._task.accumulate, self.state, self._streams, self._device, self._gradients, strategy)
        try:
            for number in range(self.num_parts):
                is_last = (number + 1) % self._task.num_pieces == 0
                share = 1 / self._task.num_pieces
                part = BatchPart(plan=self.plan, times=self.times, leaves=self._leaves, share=share, ends_batch=is_last)
                if step.takes(self.plan):
                    # No unit of the rehearsal draws, so the stream need not move.
                    step.draw_ahead(part, 0)
                else:
                    yield from step.batch(part)
            for unit in step.together():
                assert not isinstance(unit, ParallelStep), "nobody helps in a rehearsal"
                yield unit
            yield from step.finish()
        finally:
            step.close()


def _like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same geometry, on a storage of the same size."""
    with torch.no_grad():
        # A whole storage, because blocks count the bytes of storages.
        flat = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _doubles(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return copies of module and optimizer over tensors without bytes, with the originals' names, ties and options."""
    twin, doubles = bodiless_twin(module)
    placed = [(id(p), index) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
    members = [("", index) for _, index in placed]
    return twin, stand_in_for(optimizer, members, [doubles[key] for key, _ in placed])


def _plan(plan: ShardPlan, task: TrainTask, twin: nn.Module, leaves: BatchLeaves) -> ShardPlan:
    """Return the plan for tensors without bytes: no unit draws, and the user's own code runs on the twin."""
    shards = []
    for shard in plan.shards:
        module: Any = shard.graph.module
        if isinstance(module, EagerStep):
            twin.train(plan.mode == "train")
            module = EagerStep(task, twin, plan.mode, leaves, len(shard.graph.state), plan.names, shard.trained)
        # Fakes hold no numbers, so draws would only move the streams.
        shards.append(replace(shard, graph=replace(shard.graph, module=module, stochastic=False)))
    constants = {name: _like(tensor) for name, tensor in plan.constants.items()}
    computing = plan.computing if plan.eager else MemoizedShardExecutor()
    return replace(plan, shards=tuple(shards), constants=constants, computing=computing)
