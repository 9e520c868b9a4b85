"""Choice of `split_batches="auto"`: a task's batches are cut into the number of pieces that suits the pool best.

`shard/cost/microbatch_search.py` makes the choice. This module supplies the pieces to be examined, and remembers results in
`PlanLibrary.piece_counts`: similar trials get the number of the first search. `SingleTrial` (`train/single_trial.py`) asks for
the number when the trial has drawn its first training batch. The module takes no lock: trials that search at once choose alike.
"""

from dataclasses import replace

import torch
from torch import nn

from hydra_tune.errors import BudgetError
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.cost.microbatch_search import PieceCountChoice, StepCostEstimate, choose_count
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.partition.plan_request import ShardPlanRequest, key_of
from hydra_tune.task import Batch, TrainTask
from hydra_tune.train.data.handles import num_samples
from hydra_tune.train.loop.microbatches import MicroBatch, pieces


def piece_count(
    task: TrainTask, library: PlanLibrary, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> PieceCountChoice:
    """Choose the number of pieces by the first batch. Call this inside the trial's own random streams.

    Module, optimizer and batch are only read; a search leaves the module in training mode.

    Raises:
        BudgetError: not even pieces of one sample fit.
        TaskError: the step is invalid.
    """
    # Similar trials look the result up before they know a count, so the key is of the unsplit step.
    whole = replace(task, split_batches=1)
    request = ShardPlanRequest(
        task=whole,
        model=module,
        optimizer=optimizer,
        leaves=batches.flatten(batch),
        batch=batch,
        mode="train",
        like=None,
    )
    key = key_of(request)
    known_choice = None if key is None else library.piece_counts.get(key)
    if known_choice is not None:
        return known_choice

    def probe(count: int) -> StepCostEstimate | None:
        piece = next(pieces(batch, count))
        return library.foresee(replace(task, split_batches=count), module, optimizer, piece.batch)

    choice = choose_count(num_samples(batch), probe)
    if not choice.fits:
        _refuse(
            replace(task, split_batches=choice.count),
            choice,
            library,
            module,
            optimizer,
            next(pieces(batch, choice.count)),
        )
    # Costs that depend on the values of this batch say nothing about the batches of other trials.
    if key is not None and all(estimate is None or estimate.holds_for_all for _, estimate in choice.tried):
        library.piece_counts[key] = choice
    return choice


def _refuse(
    task: TrainTask,
    found: PieceCountChoice,
    library: PlanLibrary,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    piece: MicroBatch,
) -> None:
    """Raise a `BudgetError` that names the shortage and a sufficient budget, found by preparing the smallest piece."""
    # `foresee` tells only that a step does not fit; `prepare` also names the missing bytes.
    try:
        library.prepare(task, module, optimizer, piece.batch, "train")
    except BudgetError as error:
        raise BudgetError(f"split_batches='auto': {found.reason}; {error}", enough_bytes=error.enough_bytes) from error
