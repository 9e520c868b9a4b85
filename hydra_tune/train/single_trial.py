"""`SingleTrial`: a trial that trains one model, by the user's own code or by shard units.

The training loop is written once, as a generator that reads like a plain loop and yields wherever a shard unit is due.
`OwnCodeTrial` (`own_code_trial.py`) has the steps and the evaluation by the user's own code.
`JobPreparer` (`pool/runtime/preparer.py`) makes a `SingleTrial` for each admitted job with a `TrainTask` in a pool without
fusion; with fusion, `GroupMatcher` (`pool/fusion/group_matcher.py`) makes the subclass `MemberTrial`. Forecasts
(`pool/dry_run/report.py`), profiles (`pool/dry_run/simulator_profile.py`) and measurements (`train/timing/step_timing.py`)
make further `SingleTrial`s.

Note: bits. The order of draws, sums, scheduler, reports and modes is the order of `train/loop/reference_loop.py`, and a
change here needs the same change there.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.cost.microbatch_search import divisors
from hydra_tune.shard.execute.eager_plan import uncaptured
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.task import check_reported
from hydra_tune.train.building import in_training_mode, refuse_lazy
from hydra_tune.train.checkpoint.trial_checkpoint import (
    DataPosition,
)
from hydra_tune.train.data.handles import no_batch, num_samples, on_host, refuse_empty
from hydra_tune.train.hooks import refuse_gradient_hooks
from hydra_tune.train.loop.batch_units import EvaluationBatch, PendingUnit
from hydra_tune.train.loop.burst import BurstMark
from hydra_tune.train.loop.microbatch_choice import piece_count
from hydra_tune.train.loop.microbatches import MicroBatch, pieces
from hydra_tune.train.loop.optimizer_step import OptimizerStep
from hydra_tune.train.loop.plan_cache import CachedPlan
from hydra_tune.train.loop.step_comparison import StepComparisons
from hydra_tune.train.loop.training_batch import BatchPart
from hydra_tune.train.mean import EvaluationResults, WeightedMean
from hydra_tune.train.own_code_trial import END, OwnCodeTrial
from hydra_tune.train.parallel.parallel_step import ParallelStep
from hydra_tune.train.parallel.pool_offers import StepStrategy, drawn_bytes
from hydra_tune.train.parallel.step_strategy import arrange
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.trial import PendingReport, Said


class _StoppedEarly(Exception):  # noqa: N818 - no error: the way out of the loops of a complete trial
    """The user's `stop=` has ended the training."""


class SingleTrial(OwnCodeTrial):
    """A trial with a training loop of its own."""

    _latest: tuple[CachedPlan, Any] | None = None  # the plan and the data of the latest batch or piece
    _comparisons: StepComparisons | None = None
    on_report: Callable[[PendingReport], None] = staticmethod(lambda _: None)  # also of reports that need no answer

    def prepare(self, building: AbstractContextManager[object] | None = None) -> tuple[CachedPlan, batches.BatchLeaves]:
        """Build the model, draw the first batch and make its plan, without running a unit.

        A forecast (`pool/dry_run/report.py`) inspects the plan and closes the trial; `advance` must not follow. The task's
        factories run in the context `building`.

        Returns:
            The plan, and the leaves of the batch or of its first piece.
        """
        for handle in (self.task.train, self.task.validate):
            self._feed.check(handle)
        module, optimizer = self._build(building)
        in_training_mode(module)
        refuse_lazy(module)
        refuse_gradient_hooks(module)
        for batch in self._draw("train"):
            refuse_empty(batch, "train", 0, 0)
            return self._first_plan(module, optimizer, batch)
        raise no_batch("train", self.task.train, 0)

    def _first_plan(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> tuple[CachedPlan, batches.BatchLeaves]:
        """Return the plan of the first batch, and the leaves of the batch or of its first piece."""
        batch = on_host(batch)
        self._settle_pieces(module, optimizer, batch)
        piece = next(pieces(batch, self.task.num_pieces))
        leaves = batches.flatten(piece.batch)
        return self._plans.find(module, optimizer, None, piece.batch, leaves, "train"), leaves

    def _train(self) -> Generator[Said, None, None]:
        try:
            yield from self._train_epochs()
        except _StoppedEarly:
            self._reached(DataPosition(epoch=self.task.epochs))

    def _train_epochs(self) -> Generator[Said, None, None]:
        task = self.task
        for handle in (task.train, task.validate):
            self._feed.check(handle)
        module, optimizer = self._build()
        start = self._begin()
        if self._keeper is not None:
            python_state = self._python_state()
            self._python_changes.begins(python_state)
            self._keeper.begins(python_state)
        # A checkpoint may be of the moment before its report was delivered.
        if self._stop_asked != len(self.history):
            self._check_stop()
        yield from self._choose_way(module, optimizer)
        for epoch in range(start.epoch, task.epochs):
            self.progress.epoch = epoch
            place = start if epoch == start.epoch else DataPosition(epoch=epoch)
            if not place.is_over:
                self.progress.batches_per_epoch = yield from self._train_epoch(module, optimizer, place)
                if task.report_every == "epoch":
                    over = DataPosition(epoch=epoch, batches=self.progress.batches_per_epoch, is_over=True)
                    yield from self._report(epoch, over)
            # After the report, whose metric a ReduceLROnPlateau reads.
            if task.scheduler_interval == "epoch":
                self._step_scheduler()
            if epoch + 1 == task.epochs:
                # Before the last checkpoint: if nothing was left to train, the saved state has not been adopted yet.
                self._adopt_saved()
            self._reached(DataPosition(epoch=epoch + 1))
        self._adopt_saved()

    def _train_epoch(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, place: DataPosition
    ) -> Generator[Said, None, int]:
        """Train one pass over the training data, or the rest of a pass; return the number of batches of the whole pass."""
        drawn_batches, count = self._draw_pass(place.batches), place.batches
        # The rest of a pass goes on in the modes that the steps before the checkpoint have left.
        if not place.batches:
            self._set_mode(module, training=True)
        if self._direct is not None:
            count = yield from self._train_directly(self._direct, drawn_batches, place)
        # Also where the trial has just left its own code: then the batches of an undone step come first.
        if self._direct is None:
            remaining_batches = itertools.chain(self._undone_batches(), drawn_batches)
            count = yield from self._train_rest(
                module, optimizer, remaining_batches, DataPosition(epoch=place.epoch, batches=count)
            )
        return count

    def _undone_batches(self) -> Iterator[Any]:
        """Yield the batches of an undone step, each after the draws that the data made for the batch."""
        undone, self._undone = self._undone, []
        for batch, position in undone:
            if position is not None:
                self._streams.restore(position)
            yield batch

    def _train_rest(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, drawn: Iterator[Any], place: DataPosition
    ) -> Generator[Said, None, int]:
        """Train the remaining batches of a pass by shard units; return the number of batches of the whole pass."""
        epoch, count = place.epoch, place.batches
        step: OptimizerStep | None = None
        try:
            while True:
                try:
                    batch = _next_of(drawn, count, epoch)
                except Exception:
                    if step is not None:
                        # A plain loop would have trained on the earlier batches before the loader's error.
                        yield from self._together(step)
                    raise
                if batch is END:
                    break
                batch, count = on_host(batch), count + 1
                self._settle_pieces(module, optimizer, batch)
                for piece in pieces(batch, self.task.num_pieces):
                    leaves = batches.flatten(piece.batch)
                    self._follow_frozen(step)
                    cached_plan = self._plans.find(module, optimizer, self.state, piece.batch, leaves, "train")
                    self._plans.check_fresh(cached_plan, piece.batch, drawn)
                    leaves = cached_plan.with_numbers(leaves)
                    self._latest = cached_plan, piece.batch
                    self._open_step = step = step or self._new_step(cached_plan)
                    yield from self._train_part(step, cached_plan, leaves, piece)
                if step is not None and step.is_full:
                    due_step, step, self._open_step = step, None, None
                    yield from self._finish(due_step, epoch, count)
            if step is not None:
                due_step, step, self._open_step = step, None, None
                yield from self._finish(due_step, epoch, count)
        finally:
            if step is not None and not self.clock.is_abandoned:
                # An abandoned thread must leave the step alone, because `close` has already closed it on another
                # thread.
                step.close()
        if not count:
            raise no_batch("train", self.task.train, epoch)
        return count

    def _follow_frozen(self, step: OptimizerStep | None) -> None:
        """Plan the trial anew if a frozen parameter trains from the next step on (gradual unfreezing).

        Raises:
            TaskError: the parameter would begin to train within a step.
        """
        if self.state is None or not self.state.has_thawed:
            return
        if step is not None:
            self.state.check_frozen()
        CHOICES.info("frozen parameters train after step %d, so the trial is planned again", self.progress.steps)
        self._plans.clear()
        self._hand_over_state()

    def _choose_way(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Generator[BurstMark, None, None]:
        """Start running the user's own code, unless something requires cutting the model."""
        if self._device.torch_device.type != "cpu":
            refuse_lazy(module)  # parameters made by a forward on a GPU would be in no block
        if self._may_run_own_code and not is_unbuilt(module):
            budget = self._plans.library.budget
            plan_or_reason = uncaptured(self.task, module, optimizer, budget)
            if isinstance(plan_or_reason, ShardPlan):
                self._make_own_state(module, optimizer, plan_or_reason)
                yield BurstMark.BEGINS
                return
        refuse_lazy(module)
        refuse_gradient_hooks(module)

    def _settle_pieces(self, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Refuse a task whose batches cannot be split; with "auto", choose the number of pieces from the first batch."""
        if self.task.split_batches == 1 or self.state is not None:
            return
        if self.task.split_batches != "auto":
            self._check_pieces(module, batch, self.task.num_pieces)
            return
        # The smallest real split: a task that cannot be split is refused before the costly search for a count.
        fewest = divisors(num_samples(batch))[:2][-1]
        self._check_pieces(module, batch, fewest)
        with self._streams.everything():
            choice = piece_count(self.task, self._plans.library, module, optimizer, batch)
        CHOICES.info("%s", choice.reason)
        self.task = self._plans.task = replace(self.task, split_batches=choice.count)
        self.pieces_why = choice.reason
        # A single piece changes nothing, and the fewest pieces have been checked above.
        if choice.count not in (1, fewest):
            self._check_pieces(module, batch, choice.count)

    def _train_part(
        self, step: OptimizerStep, kept: CachedPlan, leaves: batches.BatchLeaves, piece: MicroBatch
    ) -> Generator[PendingUnit | ParallelStep, None, None]:
        """Run a batch or a piece of a batch: now, or together with the following batches."""
        plan = kept.plan
        part = BatchPart(plan=plan, times=kept.times, leaves=leaves, share=piece.share, ends_batch=piece.is_last)
        if kept.draws is not None and step.takes(plan):
            step.draw_ahead(part, kept.draws)
            self._ahead.append(piece.samples)
            if step.has_drawn_enough:
                yield from self._together(step)
            return
        # Batches drawn ahead come before this batch in the order of the sums.
        yield from self._together(step)
        position_before = None
        # The first run of a plan that draws is measured, so that later batches of the plan can be drawn ahead.
        may_count = self._has_several_parts and plan.may_be_split and self._plans.library.budget.counts_draws
        if may_count and not kept.is_counted:
            position_before = self._streams.position(self._device)
        yield from step.batch(part)
        if position_before is not None:
            position_after = self._streams.position(self._device)
            kept.draws, kept.is_counted = self._device.generator.draws_between(position_before, position_after), True
        self._add_loss(step.loss, piece.samples)

    def _together(
        self, step: OptimizerStep, *, ends: bool = False
    ) -> Generator[PendingUnit | ParallelStep, None, None]:
        """Run the batches drawn ahead; `ends` as of `OptimizerStep.together`."""
        samples, self._ahead = self._ahead, []
        yield from step.together(ends=ends)
        for loss, weight in zip(step.losses, samples, strict=True):
            self._add_loss(loss, weight)

    @property
    def _has_several_parts(self) -> bool:
        return self._helpers is not None and self._parts_per_step > 1

    @property
    def _parts_per_step(self) -> int:
        return self.task.accumulate * self.task.num_pieces

    def _new_step(self, kept: CachedPlan) -> OptimizerStep:
        if self.state is not None:
            self._plans.settle(kept, self.state)
        strategy = None if self.state is None else self._arrange(kept, self.state)
        if self.state is not None:
            self.state.check_optimized()
        else:
            self.state = self._lay_out(*self._objects, kept.plan)
            # Otherwise the optimizer draws nothing: a model whose optimizer draws is not cut.
            if len(kept.plan.shards) == 1 or self._device.shares_generator:
                self.state.around_step = self._streams.updating
        self.unit_times, self._step_left = kept.times, kept.times.total
        return OptimizerStep(self.task.accumulate, self.state, self._streams, self._device, self._gradients, strategy)

    def _arrange(self, kept: CachedPlan, state: ModelState) -> StepStrategy | None:
        """Arrange how the batches of the next step run together; None: one after the other."""
        if self._helpers is None or not self._has_several_parts or kept.draws is None:
            return None
        strategy = arrange(kept, state, self._helpers, self._parts_per_step, self.task.parallel)
        ahead_bytes = 0 if strategy is None else (strategy.width - 1) * drawn_bytes(kept.plan, strategy.drawn_for_each)
        if strategy is not None and not self._share.change(
            [state.layout.plan, *self._plans.all, kept.plan], ahead_bytes
        ):
            # The pool has granted devices, but the host has no room for the batches drawn ahead.
            self._leave_helpers()
            self._helpers.decline(strategy.way)
            return None
        return strategy

    def _leave_helpers(self) -> None:
        if self._helpers is not None:
            self._helpers.leave()
        if self.state is not None:
            self._share.change([self.state.layout.plan, *self._plans.all])

    def _step_scheduler(self) -> None:
        is_cut = self.state is not None and self._direct is None
        with self.state.writing() if self.state is not None and is_cut and self._scheduler_writes else nullcontext():
            super()._step_scheduler()

    def _finish(self, step: OptimizerStep, epoch: int, batches: int) -> Generator[Said, None, None]:
        try:
            yield from self._together(step, ends=True)
            if step.is_arranged:
                self._leave_helpers()
            yield from step.finish()
        finally:
            step.close()
        assert self.state is not None
        if self.state.has_own_zero_grad:
            with self._own_code():
                self.state.zero_grad()
        if self.task.after_step is not None:
            with self.state.writing(), self._own_code():
                self.task.after_step(*self._objects, self.progress.steps + 1)
        yield from self._after_step(epoch, batches)

    def _after_step(self, epoch: int, batches: int) -> Generator[Said, None, None]:
        """Do the work due after an optimizer step: scheduler, report, checkpoint."""
        task = self.task
        self.progress.steps += 1
        if task.loss_weight is not None:
            self._interval.complete()
        if task.scheduler_interval == "step":
            self._step_scheduler()
        if task.report_every != "epoch" and self.progress.steps % task.report_every == 0:
            yield from self._report(self.progress.steps, DataPosition(epoch=epoch, batches=batches))
        if self._keeper is not None:
            self._reached(DataPosition(epoch=epoch, batches=batches))

    def _report(self, step: int, place: DataPosition) -> Generator[Said, None, None]:
        self._check_captured_step()
        metrics = {"train_loss": self._interval.value()}
        self._interval = WeightedMean()
        if self.task.validate is not None:
            # Whether a pass may be skipped is asked about the training pass, not about the validation pass within.
            may_skip = self._feed.may_skip
            evaluated = yield from self._evaluate()
            self._feed.may_skip = may_skip
            with self._own_code() if self.task.finish is not None else nullcontext():
                metrics |= evaluated.metrics()
            if evaluated.nbytes and self.state is not None:
                self._share.change([self.state.layout.plan, *self._plans.all])
        check_reported(self.task.metrics, metrics)
        self.metrics = metrics
        seconds = time.perf_counter() - self._started
        self.history.append({"step": step, "epoch": place.epoch, "seconds": seconds, **metrics})
        # Before the report is delivered: after a crash the report is repeated rather than lost.
        self._reached(place, at_report=True)
        if not place.batches or place.is_over or self._feed.may_skip:
            # The trial may be saved while its report waits for an answer.
            self._place = place
        report = PendingReport(step=step, metrics=dict(metrics))
        self.on_report(report)
        yield report
        self._place = None
        self._check_stop()

    def _check_captured_step(self) -> None:
        """Compare the latest captured plan with the eager step, within a hundredth of the trial's time.

        Raises:
            TaskError: the plan gives other numbers than the eager step.
        """
        latest, self._latest = self._latest, None
        if latest is None or self.module is None or latest[0].plan.eager:
            return
        if self.state is None or self.state.has_thawed:  # the next step has another plan
            return
        cached_plan, batch = latest
        self._comparisons = self._comparisons or StepComparisons()
        self._comparisons.run(
            cached_plan.prepared,
            self.progress.steps * self.unit_times.total,
            partial(self._plans.check_again, cached_plan, self.module, self.state, batch),
        )

    def _check_stop(self) -> None:
        """Ask the user whether the trial is complete after its last report.

        Raises:
            _StoppedEarly: the trial is complete.
        """
        if self.task.stop is None or not self.history:
            return
        self._stop_asked = len(self.history)
        with self._own_code():
            is_complete = self.task.stop([dict(report) for report in self.history])
        if is_complete:
            self._adopt_saved()
            raise _StoppedEarly

    def _make_state(self) -> None:
        """Plan a training step without running the step, for a trial that resumes with an evaluation."""
        data_state = self._data_state()
        drawn_batches = self._draw("train")
        try:
            batch = next(drawn_batches)
        finally:
            drawn_batches.close()
        cached_plan, _ = self._first_plan(*self._objects, batch)
        self._new_step(cached_plan).close()
        # The batch was drawn only to make the plan; the next training pass must draw from the same position again.
        self._restore_data(data_state)

    def _evaluate(self) -> Generator[Said, None, EvaluationResults]:
        if self._direct is not None:
            return (yield from self._evaluate_directly(self._direct))
        self._set_mode(self._objects[0], training=False)
        results = EvaluationResults(self.task)
        return (yield from self._evaluate_rest(self._draw("evaluate"), results, 0))

    def _evaluate_rest(
        self, drawn: Iterator[Any], evaluated: EvaluationResults, count: int
    ) -> Generator[PendingUnit, None, EvaluationResults]:
        """Evaluate the remaining batches of a pass by shard units."""
        if self.state is None:
            self._make_state()
        assert self.state is not None
        module, optimizer = self._objects
        while True:
            with torch.no_grad():  # as in a plain loop, whose validation data may ask
                batch = next(drawn, END)
            if batch is END:
                break
            refuse_empty(batch, "validate", count)
            batch = on_host(batch)
            leaves = batches.flatten(batch)
            cached_plan = self._plans.find(module, optimizer, self.state, batch, leaves, "evaluate")
            self._plans.check_fresh(cached_plan, batch, drawn)
            leaves = cached_plan.with_numbers(leaves)
            self._evaluation_times, self._step_left = cached_plan.times, cached_plan.times.total
            step = EvaluationBatch(cached_plan.plan, cached_plan.times, self.state, leaves, self._streams, self._device)
            step.collects = self.task.finish is not None
            try:
                yield from step.units()
            finally:
                step.close()
            evaluated.add(step.metrics, num_samples(batch))
            self._reserve(evaluated)
            count += 1
            self.progress.evaluated_batches += 1
        self._evaluated(count)
        self._set_mode(module, training=True)
        return evaluated


def _next_of(drawn: Iterator[Any], number: int, epoch: int) -> Any:
    """Return the next training batch, or the end marker; refuse a batch without samples."""
    batch = next(drawn, END)
    if batch is not END:
        refuse_empty(batch, "train", number, epoch)
    return batch
