"""An optimizer step as units: forward and backward of each batch, and the updates.

`SingleTrial` (`train/single_trial.py`) makes an `OptimizerStep` at the first batch of each step that runs as shard units;
where a trial resumes with an evaluation, the trial makes and closes a step without a batch. `Trial` (`train/trial.py`)
closes the open step of a trial whose loader hangs. `TrialRehearsal` (`train/timing/fake_trial.py`) makes an `OptimizerStep`
for each rehearsed step of a forecast. `GroupExecutor` (`fusion/group/group_executor.py`) makes the subclass `GroupStep`
(`fusion/group/group_step.py`), the step of a fused group. The module must not know where blocks are or on which device a
unit runs; `train/parallel/step_strategy.py` chooses how batches run together.

Note: several batches. Batches run one after the other by default. Where loads are saved and the host has room for the values of
several batches, such batches run shard by shard (`train/parallel/batch_grouping.py`). Where other devices are idle, batches run
side by side (`train/parallel/parallel_step.py`). The result is the same.

Note: order of updates. Where no rule needs all gradients first, a shard is updated right after its last backward, while
parameters and gradients are on the device. Otherwise the updates follow all backward units, beginning with the first
shard, whose parameters and gradients were the last on the device. The updates also come last where whole batches run
side by side (`DataParallelStep`), and where batches run one after the other and the data ends before the step is full,
because the last batch was not known to be the last.

Note: order of sums. The gradient of a parameter is summed batch after batch, in the order of the draws, whichever way
the batches run; another order would change the last bits.

Note: locks. One thread at a time runs a trial's program, so an `OptimizerStep` takes no lock; workers beside each other meet in
the `ParallelStep`, which has a lock.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import BlockTensorView
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.loop.batch_units import PendingUnit, UpcomingUnit
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.loop.training_batch import BatchPart, ShardUpdate, TrainingBatch
from hydra_tune.train.parallel.batch_grouping import shard_by_shard
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, GROUPED, PIPELINED
from hydra_tune.train.parallel.grouped_data_parallel import GroupedDataParallelStep
from hydra_tune.train.parallel.parallel_batch import ParallelBatch, PredrawnBatch
from hydra_tune.train.parallel.parallel_step import DataParallelStep, ParallelStep
from hydra_tune.train.parallel.pipeline_parallel import (
    PipelineParallelStep,
    goes_with,
    groups_of_one_shard,
    may_pipeline,
)
from hydra_tune.train.parallel.pool_offers import StepStrategy
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.state.replicas import ParameterReplicas


class OptimizerStep:
    """An optimizer step and the batches of the step.

    Args:
        accumulate: number of batches in a step.
        state: the trial's long-lived tensors.
        device: any device of the pool; decides host memory, and how the streams of random numbers are moved and compared.
        arrangement: the way in which the batches run together; None: one after the other.
    """

    def __init__(
        self,
        accumulate: int,
        state: ModelState,
        streams: RandomStreams,
        device: Device,
        gradients: GradientProcessor,
        arrangement: StepStrategy | None = None,
    ) -> None:
        self._accumulate = accumulate
        self._state = state
        self._streams = streams
        self._device = device
        self._gradients = gradients
        self._held: dict[str, BlockTensorView] = {}
        self._updates: dict[str, ShardUpdate] = {}
        self._batch: TrainingBatch | None = None
        self._drawn: list[PredrawnBatch] = []
        self._drawn_batches = 0
        self._replicas = ParameterReplicas(state)
        self._spread: ParallelStep | None = None
        self._grouped: list[PredrawnBatch] = []
        self._arrangement = arrangement
        self.count = 0
        self.loss = math.nan
        self.losses: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether all batches of the step have run."""
        return self.count == self._accumulate

    @property
    def is_arranged(self) -> bool:
        """Whether batches may run together."""
        return self._arrangement is not None

    def takes(self, plan: ShardPlan) -> bool:
        """Whether batches of a plan may run together with the step's other batches."""
        strategy = self._arrangement
        if strategy is None:
            return False
        if strategy.way == DATA_PARALLEL:
            return plan.may_run_beside and (not strategy.teams or goes_with(plan, strategy.plan))
        fits = plan.may_be_pipelined if strategy.way == GROUPED else may_pipeline(plan, self._state)
        return plan is strategy.plan or (fits and goes_with(plan, strategy.plan))

    def draw_ahead(self, part: BatchPart, draws: int) -> None:
        """Keep a batch or piece whose plan `takes` accepts; `together` runs the batch with the following batches.

        The stream of the units is moved here, by the batch's `draws`.
        """
        # Before the skip: the batch draws later, from the position at which a plain loop would have drawn.
        streams = self._streams.fork()
        self._streams.skip(draws, self._device)
        end = self._streams.position(self._device) if part.plan.is_stochastic else None
        predrawn_batch: PredrawnBatch
        if self._is_grouped:
            predrawn_batch = PredrawnBatch(part, self._state, streams, end, self._device, self._gradients)
        else:
            predrawn_batch = ParallelBatch(
                part, self._state, streams, end, self._device, self._gradients, self._replicas
            )
        self._drawn_batches += part.ends_batch
        self._drawn.append(predrawn_batch)
        for update in predrawn_batch.updates():
            self._updates |= dict.fromkeys(update.names, update)

    @property
    def has_drawn_enough(self) -> bool:
        """Whether the kept batches should run now."""
        strategy = self._arrangement
        max_batches = 0 if strategy is None else strategy.width * strategy.drawn_for_each
        return self._drawn_batches == self._accumulate - self.count or len(self._drawn) == max_batches

    def together(self, *, ends: bool = False) -> Iterator[PendingUnit | ParallelStep]:
        """Run the kept batches, if any; afterwards `losses` holds their training losses.

        Args:
            ends: whether no further batch comes, though the step may not be full.

        Raises:
            BadLossError: as for `batch`.
        """
        batches, self._drawn = self._drawn, []
        self.losses = []
        if not batches:
            return
        # The sums of the batches so far must be in `_held` before they are handed on.
        self._let_go()
        earlier_sums, self._held = self._held, {}
        is_last = ends or self.count + self._drawn_batches == self._accumulate
        if self._is_grouped:
            yield from self._shard_by_shard(batches, earlier_sums, is_last=is_last)
        else:
            lanes = [batch for batch in batches if isinstance(batch, ParallelBatch)]
            yield from self._side_by_side(lanes, earlier_sums, is_last=is_last)
        # The last batch now holds the sums of all batches so far.
        self._batch = batches[-1]
        self.count += self._drawn_batches
        self._drawn_batches = 0
        self.losses = [batch.loss for batch in batches]

    @property
    def _is_grouped(self) -> bool:
        return self._arrangement is not None and self._arrangement.way == GROUPED

    def _side_by_side(
        self, lanes: list[ParallelBatch], held: dict[str, BlockTensorView], *, is_last: bool
    ) -> Iterator[ParallelStep]:
        self._spread = parallel_step = self._make_spread(lanes, held, is_last=is_last)
        yield parallel_step
        # `result` closes the parallel step and clears its lanes, so the sums wait in the last lane.
        sums = parallel_step.result()
        self._spread = None
        lanes[-1].hold(sums)

    def _shard_by_shard(
        self, batches: list[PredrawnBatch], held: dict[str, BlockTensorView], *, is_last: bool
    ) -> Iterator[PendingUnit]:
        self._grouped = batches
        batches[0].take_in(held)
        self._batch = None
        yield from shard_by_shard(batches, is_last=is_last)
        for batch in batches:
            batch.check_draws()
        last_batch = batches[-1]
        for batch in batches[:-1]:
            # Sums of parameters that no batch of the group has used still belong to the step.
            last_batch.take_in(batch.give_away(self._updates))
            batch.clear()
        self._grouped = []

    def _make_spread(
        self, lanes: list[ParallelBatch], held: dict[str, BlockTensorView], *, is_last: bool
    ) -> ParallelStep:
        strategy = self._arrangement
        assert strategy is not None, "batches are only kept where they may run beside each other"
        # Clipping and loss scaling need all gradients before the first update.
        updates = is_last and not self._gradients.has_two_phases
        if strategy.teams:
            return GroupedDataParallelStep(lanes, held, self._replicas, count=strategy.teams, updates=updates)
        if strategy.way != PIPELINED:
            return DataParallelStep(lanes, list(self._updates), held, strategy.width, self._replicas)
        self._replicas.moving = groups_of_one_shard(strategy.plan, self._state)
        return PipelineParallelStep(
            lanes,
            held,
            strategy.width,
            self._replicas,
            homes=strategy.homes,
            goes_on_with_shard=strategy.is_dealt,
            updates=updates,
        )

    def batch(self, part: BatchPart) -> Iterator[PendingUnit]:
        """Yield the units of another batch or piece; afterwards `loss` holds the training loss.

        Raises:
            BadLossError: the loss is not finite; no further unit of the step may run.
        """
        self._let_go()
        batch = self._batch = self._batch_of(part)
        batch.take_in(self._held)
        self._held = {}
        for update in batch.updates():
            self._updates |= dict.fromkeys(update.names, update)
        yield from batch.units(is_last=part.ends_batch and self.count + 1 == self._accumulate)
        self.count += part.ends_batch
        self.loss = batch.loss

    def _batch_of(self, part: BatchPart) -> TrainingBatch:
        return TrainingBatch(part, self._state, self._streams, self._device, self._gradients)

    def finish(self) -> Iterator[PendingUnit]:
        """Yield the remaining units once no further batch comes: updates that had to wait, or had no batch of their own."""
        batch = self._batch
        assert batch is not None, "a step has at least one batch"
        gradients = batch.give_away(self._updates)
        batch.hold(gradients)
        if self._gradients.has_two_phases:
            for update in self._waiting(set(gradients) - batch.completed):
                yield batch.complete_unit(update)
        takes_step = self._takes_step()
        if takes_step:
            updates = self._waiting(set(gradients))
            for number, update in enumerate(updates):
                yield batch.update_unit(update, partial(self._after_update, batch, updates[number + 1 :]))
        # Updates on the host must be over before the trial's own code runs again.
        self._state.settle()
        if takes_step:
            self._state.end_step()
        self._gradients.next_step()

    def _takes_step(self) -> bool:
        """Whether the step updates parameters, now that all gradients are complete."""
        return not self._gradients.skips_update

    @staticmethod
    def _after_update(batch: TrainingBatch, left: Sequence[ShardUpdate]) -> list[UpcomingUnit]:
        return [batch.expected_update(left[0]) if left else batch.expected_step()]

    def close(self) -> None:
        """Give up all values of the step."""
        for batch in (*self._drawn, *self._grouped):
            batch.clear()
        if self._spread is not None:
            self._spread.close()
        self._let_go()
        if self._held and self._batch is not None:
            self._batch.hold(self._held)
            self._held = {}
            self._batch.clear()

    def _let_go(self) -> None:
        """Drop the last batch's values, and keep its gradients."""
        if self._batch is not None:
            self._held |= self._batch.give_away(self._updates)
            self._batch.close()

    def _waiting(self, names: set[str]) -> list[ShardUpdate]:
        updates_by_shard: dict[tuple[int, int], ShardUpdate] = {}
        for name in sorted(names):
            update = self._updates[name]
            # Batches of different kinds have different plans, whose shards of one index may train other parameters.
            updates_by_shard.setdefault((update.index, id(update.shard)), update)
        return [
            ShardUpdate(index=u.index, shard=u.shard, names=tuple(n for n in u.names if n in names))
            for _, u in sorted(updates_by_shard.items(), key=lambda item: item[0][0])
        ]
