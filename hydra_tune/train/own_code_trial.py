"""`OwnCodeTrial`: a trial that trains by the user's own code, as long as its steps fit.

`SingleTrial` (`single_trial.py`) derives from `OwnCodeTrial`, and runs the rest as shard units where a step does not fit.
`LoopTrial` (`own_loop/loop_trial.py`) derives from `OwnCodeTrial` for the state and the bursts alone. Order and bits are
those of `train/loop/reference_loop.py`. The module must not know the pool or the scheduler.

Note: bursts. `BurstRunner` (`train/loop/burst.py`) resumes the generators here within a unit, and reads their
`BurstMark`s, as `Trial.advance` (`trial.py`) does. The user's step may run only while the burst has a device, so a
generator yields `BurstMark.NO_DEVICE` after each draw that has cost the device. A step that does not fit even with its
activations on the host is undone and run again from the same positions of all streams.

Note: locks. In a pool, a thread that resumes the generators holds a turn (`pool/runtime/job_state.py`); the trial has no
lock.
"""

import itertools
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import BudgetError, TaskError
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.execute.eager_plan import uncaptured
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.train.checkpoint.trial_checkpoint import DataPosition
from hydra_tune.train.data.handles import no_batch, num_samples, on_host, refuse_empty
from hydra_tune.train.hooks import refuse_gradient_hooks
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.burst import BurstMark, BurstRunner, BurstSteps
from hydra_tune.train.loop.direct import WholeModelRunner
from hydra_tune.train.loop.microbatches import check_pieces, pieces, refuse_batch_norm
from hydra_tune.train.mean import EvaluationResults, WeightedMean
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.unit_times import UnitTimes, step_guess
from hydra_tune.train.trial import PendingReport, Said, Trial

END = object()
STEP = "step"
"""Key for steps of the user's own code among the times of units."""


class OwnCodeTrial(Trial):
    """A trial that runs the user's own step and evaluation; `SingleTrial` has the training loop around both."""

    def leave_devices(self) -> bool:
        """Bring home the state that `close` will hand over, and return whether the state is home."""
        return self.state is not None and self.state.leave_devices()

    def _hand_over_state(self) -> None:
        """Bring the state home, for a state of another layout."""
        assert self.module is not None
        assert self.state is not None
        self.state.hand_over()
        self._left, self.state = self.state, None
        refuse_gradient_hooks(self.module)

    def _set_mode(self, module: nn.Module, *, training: bool) -> None:
        """Switch the module's mode, where a plain loop does."""
        # Methods of the user's own may write weights, which may lie on a device or on the disk.
        is_cut = self.state is not None and self._direct is None
        writes = is_cut and any(
            getattr(method, "__func__", None) is not original
            for part in module.modules()
            for method, original in ((part.train, nn.Module.train), (part.eval, nn.Module.eval))
        )
        with nullcontext() if self.state is None or not writes else self.state.writing(), self._own_code():
            module.train() if training else module.eval()

    def _make_own_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, plan: ShardPlan, *, always_sheds: bool = False
    ) -> None:
        self._direct = WholeModelRunner(
            self.task, module, optimizer, self._gradients, self._streams, always_sheds=always_sheds
        )
        self._make_bursts(module, optimizer, plan, self._direct)

    def _make_bursts(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, plan: ShardPlan, runner: BurstSteps
    ) -> None:
        """Make the trial's state, and run the program in bursts from here on."""
        state = self._lay_out(module, optimizer, plan, runs_own_code=True)
        times = UnitTimes({STEP: step_guess(plan.shards[0].cost.state_bytes)}), UnitTimes({STEP: 0.0})
        self.unit_times, self._evaluation_times = times
        self._bursts = BurstRunner(self._program, runner, state, self._streams)
        self._bursts.is_asked_to_end = self._is_asked_to_end
        self._bursts.passes_report = self._passes_report

    def _is_asked_to_end(self) -> bool:
        # Looked up at each call, because the pool may replace the callback during a burst.
        return self.is_asked_to_end()

    def _passes_report(self, item: object) -> bool:
        return isinstance(item, PendingReport) and self.passes_report(item)

    def _train_directly(
        self, direct: WholeModelRunner, drawn: Iterator[Any], place: DataPosition
    ) -> Generator[Said, None, int]:
        """Do the work of `_train_epoch` with the user's own code; end early where the rest has to be cut.

        The caller resumes this generator inside a burst, on a device that holds all of the trial's state.
        """
        epoch, count, pending = place.epoch, place.batches, 0
        batch, step_start = None, time.perf_counter()
        step_batches: list[tuple[Any, Any]] = []
        moves = 0
        for batch in drawn:
            samples = refuse_empty(batch, "train", count, epoch)
            if not self._has_device:
                step_start = yield from self._on_device(step_start)
            count += 1
            if not pending:
                step_batches, interval = [], self._interval.parts
            # Where the data draw between two batches of a step, a batch that is undone begins from behind these draws.
            has_drawn = pending > 0 and self._streams.moves() != moves
            step_batches.append((batch, self._streams.state() if has_drawn else None))
            try:
                self._train_batch(direct, batch, samples, is_first=not self.progress.steps and not pending)
            except BudgetError:
                if not _may_be_cut(batch) or not direct.undo("train"):
                    raise
                # The undone step will run again as shard units, so its losses must not count twice.
                self._interval, self._undone = WeightedMean(*interval), step_batches
                yield from self._leave_own_code(direct, "a step does not fit, even with its activations on the host")
                return count - len(step_batches)
            pending += 1
            if pending < self.task.accumulate:
                moves = self._streams.moves()
                continue
            pending = 0
            yield from self._step_directly(direct, batch, step_start)
            yield from self._after_step(epoch, count)
            if self._direct is None:
                return count
            yield BurstMark.STEP
            direct, step_start = self._direct, time.perf_counter()
        if not count:
            raise no_batch("train", self.task.train, epoch)
        step_start = yield from self._on_device(step_start)
        if pending:
            yield from self._step_directly(direct, batch, step_start)
            yield from self._after_step(epoch, count)
        return count

    def _on_device(self, begun: float) -> Generator[Said, None, float]:
        """Get a device: the one of the last step may be gone since the loader looked for a next batch.

        Returns:
            The start of the step by `time.perf_counter`: `begun`, or now, after a wait for a device.
        """
        if self._has_device:
            return begun
        yield BurstMark.NO_DEVICE
        return time.perf_counter()

    def _step_directly(self, direct: WholeModelRunner, batch: Any, begun: float) -> Generator[Said, None, None]:
        """Take the optimizer's step; cut the rest of the training if the step fit only with its activations on the host.

        A model without a finer cut keeps running the user's own code, with activations on the host in every step.
        """
        direct.step(self.progress.steps + 1)
        self._took(self.unit_times, begun)
        if direct.has_followed:
            direct.has_followed = False
            yield BurstMark.FOLLOWED
        if not direct.has_shed or direct.always_sheds:
            return
        yield from self._leave_own_code(direct, "its activations do not fit beside its state")
        module, optimizer = self._objects
        piece = on_host(next(pieces(batch, self.task.num_pieces)).batch)
        try:
            if _may_be_cut(piece):
                self._plans.find(module, optimizer, None, piece, batches.flatten(piece), "train")
                return
            reason: object = "its batches hold more than tensors and plain values"
        except BudgetError as error:
            plan_or_reason = uncaptured(self.task, module, optimizer, self._plans.library.budget)
            if not isinstance(plan_or_reason, ShardPlan):
                raise
            reason = error
        else:
            plan_or_reason = uncaptured(self.task, module, optimizer, self._plans.library.budget)
        if isinstance(plan_or_reason, ShardPlan):
            CHOICES.info("the trial keeps its own code, with its activations on the host: %s", reason)
            self._make_own_state(module, optimizer, plan_or_reason, always_sheds=True)
            yield BurstMark.BEGINS

    def _leave_own_code(self, direct: WholeModelRunner, why: str) -> Generator[Said, None, None]:
        """Switch the trial from its own code to shard units."""
        CHOICES.info("the trial is cut after step %d: %s", self.progress.steps, why)
        direct.close()
        yield BurstMark.LEAVES
        self._direct = None
        self._hand_over_state()

    def _took(self, times: UnitTimes, begun: float) -> None:
        """Record that a step of the user's own code, or a batch evaluated by the code, is over."""
        times.measured(STEP, time.perf_counter() - begun)
        self.units_run += 1

    def _evaluate_directly(self, direct: WholeModelRunner) -> Generator[Said, None, EvaluationResults]:
        """Do the work of `_evaluate` with the user's own code, as long as the batches fit."""
        assert self.module is not None
        evaluated, count = EvaluationResults(self.task), 0
        self._set_mode(self.module, training=False)
        drawn_batches = self._draw("evaluate")
        while True:
            with torch.no_grad():
                # Not around a yield: the caller that resumes the program must record gradients meanwhile.
                batch = next(drawn_batches, END)
            if not self._has_device:
                yield BurstMark.NO_DEVICE
            if batch is END:
                break
            start = time.perf_counter()
            refuse_empty(batch, "validate", count)
            try:
                with torch.no_grad():
                    values = direct.evaluate(batch)
            except BudgetError:
                # The shard units evaluate the batch again, and must draw the same numbers.
                if not _may_be_cut(batch) or not direct.undo("evaluate"):
                    raise
                yield from self._leave_own_code(direct, "a validation batch does not fit beside its state")
                return (yield from self._evaluate_rest(itertools.chain([batch], drawn_batches), evaluated, count))
            evaluated.add(values, num_samples(batch))
            self._reserve(evaluated)
            count += 1
            self.progress.evaluated_batches += 1
            self._took(self._evaluation_times, start)
            yield BurstMark.STEP
        self._set_mode(self.module, training=True)
        self._evaluated(count)
        return evaluated

    def _reserve(self, evaluated: EvaluationResults) -> None:
        """Reserve host memory for the values collected for `finish=`.

        Raises:
            BudgetError: there is no room.
        """
        if not evaluated.nbytes or self.state is None:
            return
        if not self._share.change([self.state.layout.plan, *self._plans.all], evaluated.nbytes):
            raise BudgetError(
                f"the values that evaluate= returns for finish= take {format_bytes(evaluated.nbytes)} of host memory so far, "
                "which is not free beside what other trials keep there; return less from evaluate= (a class number in place "
                "of logits), raise host_memory, or run fewer trials at a time (max_concurrent)"
            )

    def _evaluated(self, count: int) -> None:
        """Record the number of evaluated batches; refuse a pass without any."""
        if not count:
            assert self.task.validate is not None
            raise no_batch("validate", self.task.validate)
        self.progress.validation_batches = count

    def _train_batch(self, direct: WholeModelRunner, batch: Any, samples: int, *, is_first: bool) -> None:
        """Run the forward and backward of a batch, in as many pieces as the task asks for."""
        count = self.task.num_pieces
        if count == 1:
            self._add_loss(direct.train(batch, 1.0), samples)
            return
        # Of the first batch alone, as in `train_plain`: later ones may be padded.
        if is_first and self.module is not None:
            self._check_pieces(self.module, batch, count)
        for piece in pieces(batch, count):
            self._add_loss(direct.train(piece.batch, piece.share), piece.samples)

    def _add_loss(self, loss: float, samples: int) -> None:
        """Add the training loss of a batch or a piece to the mean of the next report."""
        if self.task.loss_weight is None:
            self._interval.add(loss, samples)
        else:
            self._interval.add_part(loss)

    def _check_pieces(self, module: nn.Module, batch: Any, count: int) -> None:
        with self._own_code():
            # A module without real parameters cannot run, but its layers can be inspected.
            if is_unbuilt(module):
                refuse_batch_norm(self.task, module)
            else:
                check_pieces(self.task, module, batch, count)

    def _lay_out(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, plan: ShardPlan, *, runs_own_code: bool = False
    ) -> ModelState:
        """Make the trial's state for a plan, with the values of the previous state or of a checkpoint, if any."""
        self._share.check(plan)
        previous_state, self._left = self._left, None
        self.state = state = ModelState(
            module,
            optimizer,
            plan,
            self._device,
            self._host,
            self._tenant,
            previous_state,
            runs_own_code=runs_own_code,
            may_share=True,
        )
        if previous_state is not None:
            state.adopt_saved(previous_state.optimizer_state(), self._device)
        elif self._saved is None:
            state.adopt_made(self._device)
        self._adopt_saved()
        self.num_shards, self.optimizer_placement = len(plan.shards), plan.optimizer_placement
        self.one_shard_bytes = plan.one_shard_bytes
        return state

    def _after_step(self, epoch: int, batches: int) -> Generator[Said, None, None]:
        """Do the work due after an optimizer step: scheduler, report, checkpoint."""
        raise NotImplementedError

    def _evaluate_rest(
        self, drawn: Iterator[Any], evaluated: EvaluationResults, count: int
    ) -> Generator[PendingUnit, None, EvaluationResults]:
        """Evaluate the remaining batches of a pass by shard units."""
        raise NotImplementedError


def _may_be_cut(batch: Any) -> bool:
    """Whether a captured step could take the batch."""
    try:
        batches.flatten(batch)
    except TaskError:
        return False
    return True
