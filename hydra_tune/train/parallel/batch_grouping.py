"""Batches of one optimizer step shard by shard: all batches go through a shard before the next shard is loaded.

So a step loads each shard twice, for the forward and for the backward, and writes each shard back once, whatever the
number of batches: 3|W| bytes of parameters. Batches one after the other move 2|W| for each batch and |W| for the
update. In exchange, the values between shards of all batches are moved. `OptimizerStep`
(`train/loop/optimizer_step.py`) runs the batches this way where `step_strategy.py` has chosen to group a step.
`step_strategy.py` and forecasts (`train/timing/fake_trial.py`, `pool/dry_run/simulator_profile.py`) ask `is_worth_it`. The
module must not choose devices.

The results are the results of a plain loop. A parameter's gradients are summed in the order of the batches: a batch's
gradients join the sum of all earlier batches when their shard's backward is over. A shard's buffers are overwritten in
the order of the batches, too; where several shards use a buffer and a shard overwrites the buffer, batches are not
grouped (`ShardPlan.may_be_pipelined`).

Source: Harmony (Li et al.), section 3, "input-batch grouping" and "just-in-time" updates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from hydra_tune.shard.cost.traffic_model import is_worth_grouping
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.loop.batch_units import PendingUnit, UpcomingUnit
from hydra_tune.train.loop.training_batch import TrainingBatch


def shard_by_shard(batches: Sequence[TrainingBatch], *, is_last: bool) -> Iterator[PendingUnit]:
    """Yield the units of batches whose plans have the same shards.

    Args:
        batches: the batches in order; the first holds the gradients of earlier batches, and at the end the last holds
            all.
        is_last: whether the step is complete with these batches, so that each shard is updated after its last backward.

    Raises:
        BadLossError: the error of the first batch with a loss that is not finite; nothing has been updated.
    """
    num_shards = batches[0].num_shards
    order = [("forward", index, batch) for index in range(num_shards - 1) for batch in batches]
    order += [("backward", index, batch) for index in reversed(range(num_shards)) for batch in batches]
    previous_batch = None
    for position, (kind, index, batch) in enumerate(order):
        next_units = partial(_following, order[position + 1 :], batches[-1])
        if kind == "forward":
            yield replace(batch.forward_unit(index), following=next_units)
            continue
        # The sums go from batch to batch in order, so each addition has the operands of a plain loop.
        if previous_batch is not None and batch is not batches[0]:
            batch.take_in(previous_batch.give_away(batch.trained[index]))
        previous_batch = batch
        for unit in batch.backward_units(index, is_last=is_last and batch is batches[-1]):
            updates = (
                []
                if unit.kind == "update"
                else [upcoming_unit for upcoming_unit in unit.following() if upcoming_unit.kind == "update"]
            )
            yield replace(unit, following=partial(next_units, updates))


def _following(
    order: Sequence[tuple[str, int, TrainingBatch]], last: TrainingBatch, updates: Sequence[UpcomingUnit] = ()
) -> list[UpcomingUnit]:
    """Return the next unit of a group, after updates of the unit's own shard."""
    expectations = (batch.expected(kind, index) for kind, index, batch in order)
    return [
        *updates,
        next((expectation for expectation in expectations if expectation is not None), last.expected_step()),
    ]


def is_worth_it(plan: ShardPlan) -> bool:
    """Whether a batch moves fewer bytes in a group than after the other batches; see `is_worth_grouping`."""
    return is_worth_grouping([shard.cost for shard in plan.shards])
