"""`Trial`: the course of a trial over time, as a sequence of shard units and reports.

The training loop is written once, as a generator that reads like a plain loop and yields wherever a shard unit is due.
The pool runs the unit on a device of its choice and then resumes the generator. A trial knows nothing of other trials
or of the schedule.

The pool's preparer builds a `Trial`, workers resume the trial after each unit, and `MemberTrial` runs the same loop in
a fused group.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hydra_tune.devices.device import Device, DeviceStopwatch
from hydra_tune.errors import BadLossError, BudgetError, MetricError, TaskError
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.meta_models import is_unbuilt
from hydra_tune.shard.cost.microbatch_search import divisors
from hydra_tune.shard.execute.eager_plan import uncaptured
from hydra_tune.shard.operators.operator_splitting import SplitOperators, split_operators
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.partition.shard_size_search import CHOICES
from hydra_tune.task import TrainTask, check_reported, reported_names
from hydra_tune.train.building import build_model, build_optimizer
from hydra_tune.train.checkpoint.compatibility import copied, is_of_the_pass
from hydra_tune.train.checkpoint.snapshot import SnapshotSaver, TrialStateSnapshot
from hydra_tune.train.checkpoint.trial_checkpoint import (
    DataPosition,
    StartCheckpoint,
    TrialObjects,
    decoded,
    encoded,
    place_after,
)
from hydra_tune.train.claims import TrialClaim
from hydra_tune.train.data.data_feed import SkippedBatches, TrialDataFeed
from hydra_tune.train.data.handles import no_batch, num_batches, num_samples, refuse_empty
from hydra_tune.train.data.loader_clock import DrawClock
from hydra_tune.train.hooks import refuse_gradient_hooks
from hydra_tune.train.loop.batch_units import EvaluationBatch, PendingUnit
from hydra_tune.train.loop.burst import BURST, BurstMark, BurstRunner, nobody_asks
from hydra_tune.train.loop.direct import WholeModelRunner
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.loop.microbatch_choice import piece_count
from hydra_tune.train.loop.microbatches import MicroBatch, check_pieces, pieces, refuse_batch_norm
from hydra_tune.train.loop.optimizer_step import OptimizerStep
from hydra_tune.train.loop.plan_cache import CachedPlan, TrialPlanCache
from hydra_tune.train.loop.training_batch import BatchPart
from hydra_tune.train.mean import WeightedMean
from hydra_tune.train.parallel.parallel_step import ParallelStep
from hydra_tune.train.parallel.pool_offers import DeviceLender, StepStrategy, drawn_bytes
from hydra_tune.train.parallel.step_strategy import arrange
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.host_quota import HostMemoryQuota, fixed_bytes, largest_bytes
from hydra_tune.train.state.model_state import ModelState, check_optimizer
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from hydra_tune.train.timing.unit_times import TrialProgressCounts, UnitTimes, step_guess

_NOTHING = nullcontext()
_END = object()
# Key for steps of the user's own code among the times of units.
_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReport:
    """A due report; the trial waits for an answer.

    Attributes:
        step: the epoch, from 0, or with `report_every=n` the number of optimizer steps done.
        metrics: `train_loss` and `val_<name>`.
    """

    step: int
    metrics: dict[str, float]


Said = PendingUnit | ParallelStep | PendingReport | BurstMark
"""Everything that a trial's program yields: units and reports for the pool, marks for the trial."""


class Trial:
    """A training run under way.

    Args:
        task: task to train.
        library: source of plans.
        device: any device of the pool, for host memory.
        helpers: asked before a step whose batches may run side by side; None: no device could help.
        host: counts host copies and sends some to disk; None: the host has room for all.
        tenant: the trial, for `host`.
        times: measured times of the units of plans, shared by the trials of a pool; None: the trial measures alone.
        beginning: state from which the trial resumes; None: the trial starts from scratch.
        keeper: saves the trial between its steps; None: the trial is never saved.
        may_run_own_code: whether the trial runs the user's own step where the step fits; otherwise the step is always
            captured.
    """

    def __init__(
        self,
        task: TrainTask,
        library: PlanLibrary,
        device: Device,
        helpers: DeviceLender | None = None,
        host: HostTier | None = None,
        tenant: TrialMemoryContext | None = None,
        times: SharedUnitTimes | None = None,
        *,
        beginning: StartCheckpoint | None = None,
        keeper: SnapshotSaver | None = None,
        may_run_own_code: bool = True,
    ) -> None:
        self.task = task
        self.history: list[dict[str, float]] = []
        self.metrics: dict[str, float] = {}
        self.compute_seconds, self.units_run, self.num_shards = 0.0, 0, 0
        self.optimizer_placement: str | None = None
        # The reason for the number of pieces, if the number was chosen here.
        self.pieces_why: str | None = None
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.state: ModelState | None = None
        self.progress = TrialProgressCounts(
            epochs=task.epochs,
            accumulate=task.accumulate,
            report_every=None if task.report_every == "epoch" else task.report_every,
            batches=num_batches(task.train, task.batch_size),
            validation=0 if task.validate is None else num_batches(task.validate, task.batch_size),
        )
        self._claimed: TrialClaim | None = None
        self._device, self._helpers = device, helpers
        self._lock = threading.Lock()
        self._host, self._tenant = host, tenant
        self._streams = RandomStreams(task.seed)
        self._gradients = GradientProcessor(task)
        self._feed = TrialDataFeed(task.batch_size, self._own_code, self._streams.moves, self._waiting)
        self._scheduler: Any = None
        self._beginning, self._keeper = beginning, keeper
        self._built: TrialObjects | None = None
        # Restored optimizer state, until there are groups for it.
        self._saved: dict[str, Any] | None = None
        # Set only while the trial may be saved.
        self._place: DataPosition | None = None
        self._pass_began: dict[str, Any] = {}
        self._operators = SplitOperators()
        self._share = HostMemoryQuota(host, tenant)
        self._plans = TrialPlanCache(task, library, self._streams, device, self._share, times or SharedUnitTimes())
        self._interval = WeightedMean()
        self._started = time.perf_counter()
        self._train_times, self._evaluation_times = UnitTimes({}), UnitTimes({})
        self._step_left = 0.0
        # Samples of each batch drawn ahead.
        self._ahead: list[int] = []
        # The step whose batches are being drawn.
        self._open_step: OptimizerStep | None = None
        self._may_run_own_code = may_run_own_code
        # Both set only while the trial runs its own code.
        self._bursts: BurstRunner | None = None
        self._direct: WholeModelRunner | None = None
        # The state from the trial's own code, until there is a plan.
        self._left: ModelState | None = None
        # Batches of an undone step, to run again as shard units.
        self._undone: list[Any] = []
        self.is_asked_to_end: Callable[[], bool] = nobody_asks
        self.why_cut, self.outcome = "", "completed"
        self._program = self._run()

    def advance(self) -> PendingUnit | ParallelStep | PendingReport | None:
        """Resume the program up to the next unit, parallel step or report; return None at the end.

        The call runs the trial's own code: never call `advance` inside a unit, nor before all units of a `ParallelStep`
        have run.
        """
        while True:
            bursts = self._bursts
            if bursts is not None and not bursts.has_due:
                return bursts.unit()
            item: Said | None
            if bursts is None:
                item = next(self._program, None)
            else:
                # The burst has already advanced the program, so its last value is handed out first.
                item, bursts.due, bursts.has_due = bursts.due, None, False
            if item is BurstMark.LEAVES:
                self._bursts = None
            elif not isinstance(item, BurstMark):
                return item

    def leave_device(self) -> None:
        """Keep the burst under way, if any, from going on after its draw; on any thread, while the draw cannot end."""
        if self._bursts is not None:
            self._bursts.leave_device()

    def end_lease(self) -> None:
        """Give back the device memory of a burst after `leave_device`. Callable on any thread."""
        bursts = self._bursts
        if bursts is not None:
            bursts.end_lease()

    def prepare(self, building: AbstractContextManager[object] | None = None) -> tuple[CachedPlan, batches.BatchLeaves]:
        """Build the model, draw the first batch and make its plan, without running a unit.

        Callers inspect the result instead of training.

        Args:
            building: context manager entered around the task's factories.

        Returns:
            The plan, and the leaves of the batch or of its first piece.
        """
        for handle in (self.task.train, self.task.validate):
            self._feed.check(handle)
        module, optimizer = self._build(building)
        in_training_mode(module)
        refuse_lazy(module)
        refuse_gradient_hooks(module)
        for batch in self._draw(self.task.train, shuffle=True):
            refuse_empty(batch, "train", 0, 0)
            self._settle_pieces(module, optimizer, batch)
            piece = next(pieces(batch, self.task.num_pieces))
            leaves = batches.flatten(piece.batch)
            cached_plan = self._plans.find(module, optimizer, None, piece.batch, leaves, "train")
            return cached_plan, leaves
        raise no_batch("train", self.task.train, 0)

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """Record the seconds taken by a unit."""
        with self._lock:
            self.compute_seconds += seconds
            # Sums exist only where batches run side by side, so the count would depend on the devices; `_took` counts
            # the steps of bursts.
            self.units_run += unit.kind not in ("sum", BURST)
            # Under the lock, because lanes of a parallel step end on several workers at once.
            self._step_left = max(0.0, self._step_left - unit.seconds)
            unit.times.measured(unit.key, seconds)

    @property
    def clock(self) -> DrawClock:
        """Clock of the wait for the trial's loader."""
        return self._feed.clock

    @property
    def activations(self) -> tuple[str, ...]:
        """How the activations of each shard but the last are handled until the backward; empty before the first step."""
        state = self.state
        return () if state is None else tuple(state.activations_of(shard) for shard in state.layout.plan.shards[:-1])

    @property
    def split_batches(self) -> int | None:
        """Pieces of each batch; None until the number has been chosen."""
        return None if self.task.split_batches == "auto" else self.task.split_batches

    @property
    def unit_times(self) -> UnitTimes:
        """Seconds of the units of one optimizer step, as known now."""
        return self._train_times

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step, as known now; at least the turn with a device where the trial runs its own code."""
        bursts = self._bursts
        return self._train_times.total if bursts is None else max(bursts.turn_seconds, self._train_times.total)

    @property
    def alike(self) -> str | None:
        """Name under which the trial shares measured step times with other trials; None if the trial measures alone."""
        return self._train_times.name

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come, as known now."""
        steps = self.progress.steps_left * self._train_times.total
        evaluation = self.progress.evaluated_batches_left * self._evaluation_times.total
        if self._bursts is not None:
            return steps + evaluation
        return self._step_left + max(0.0, steps - self._train_times.total) + evaluation

    @property
    def units_planned(self) -> int | None:
        """Units of the whole run; None if the length of the data is unknown."""
        steps, evaluated = self.progress.num_steps, self.progress.num_evaluated_batches
        if steps is None or evaluated is None:
            return None
        # Before the first evaluation its units are taken to be as many as the shards.
        per_batch = len(self._evaluation_times) or self.num_shards
        return steps * len(self._train_times) + evaluated * per_batch

    @property
    def host_bytes(self) -> int:
        """Host memory for the trial's state and the values between its units, in bytes."""
        if self.state is None:
            return 0
        shards = self.state.layout.plan.shards
        return self.state.nbytes + sum(shard.cost.held_bytes for shard in shards)

    @property
    def fixed_host_bytes(self) -> int:
        """Host memory that cannot go to disk while the trial lives, in bytes: spilled activations of whole units."""
        return 0 if self.state is None else fixed_bytes(self.state.layout.plan)

    @property
    def largest_host_bytes(self) -> int:
        """Bytes of the largest block of the trial."""
        return 0 if self.state is None else largest_bytes(self.state.layout.plan)

    def reserve_host(self) -> None:
        """Reserve the host memory that cannot go to disk, until the trial is closed."""
        self._share.take()

    def close(self, *, keep: bool) -> None:
        """End the trial: drop the values of the step, and bring the state home or drop the state too.

        Args:
            keep: whether the state is brought home as the trial's result; otherwise the state is dropped.
        """
        try:
            if self.clock.is_abandoned:
                # The program hangs in the loader on another thread, so closing the generator here is impossible.
                self._close_open_step()
            else:
                self._program.close()
        finally:
            self._feed.close()
            self._share.leave()
            if self.state is not None:
                if keep:
                    self._hand_over(self.state)
                else:
                    self.state.drop()
            # Only now: until the bytes are home, another trial must not train the same module.
            if self._claimed is not None:
                self._claimed.give_up()
            self._claimed = None
            self._plans.clear()
            self._let_go()

    def _close_open_step(self) -> None:
        step, self._open_step = self._open_step, None
        if step is not None:
            step.close()

    def _let_go(self) -> None:
        """Release all references to weights: a trial has reference cycles and may live until the garbage collector runs."""
        self.module, self.optimizer, self.state = None, None, None
        self._direct, self._bursts, self._left, self._undone = None, None, None, []
        # The old callback knows the job, and so would keep its result alive.
        self.is_asked_to_end = nobody_asks
        self._scheduler, self._operators, self._helpers = None, SplitOperators(), None
        self._built, self._beginning, self._saved, self._pass_began = None, None, None, {}

    def _hand_over(self, state: ModelState) -> None:
        try:
            state.hand_over(is_result=True)
            self._operators.restore(state.optimizer)
        # A file that cannot be read fails the hand-over, and nothing of the trial may stay behind.
        except BaseException:
            state.drop()
            raise

    def _run(self) -> Generator[Said, None, None]:
        """Run the training loop to its end or to a bad loss."""
        try:
            yield from self._train()
        except BadLossError as error:
            if self.task.on_bad_loss == "fail":
                raise BadLossError(
                    f"{error} in step {self.progress.steps + 1} (epoch {self.progress.epoch}); lower the learning rate, clip "
                    "the gradients (max_grad_norm), or let such trials be pruned (on_bad_loss='prune')"
                ) from None
            self.outcome = "pruned"
        except RuntimeError as error:
            # Python turns a StopIteration that leaves a generator into a RuntimeError (PEP 479).
            if not isinstance(error.__cause__, StopIteration):
                raise
            detail = f": {error.__cause__}" if str(error.__cause__) else ""
            raise TaskError(f"the trial's own code raised StopIteration{detail}") from error.__cause__

    def _train(self) -> Generator[Said, None, None]:
        task = self.task
        for handle in (task.train, task.validate):
            self._feed.check(handle)
        module, optimizer = self._build()
        start = self._begin()
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
        if self._direct is not None:
            # The rest of a pass goes on in the modes that the steps before the checkpoint have left.
            if not place.batches:
                module.train()
            count = yield from self._train_directly(self._direct, drawn_batches, place)
        # Also where the trial has just left its own code: then the batches of an undone step come first.
        if self._direct is None:
            undone_batches, self._undone = self._undone, []
            remaining_batches = itertools.chain(undone_batches, drawn_batches)
            count = yield from self._train_rest(
                module, optimizer, remaining_batches, DataPosition(epoch=place.epoch, batches=count)
            )
        return count

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
                if batch is _END:
                    break
                count += 1
                self._settle_pieces(module, optimizer, batch)
                for piece in pieces(batch, self.task.num_pieces):
                    leaves = batches.flatten(piece.batch)
                    cached_plan = self._plans.find(module, optimizer, self.state, piece.batch, leaves, "train")
                    self._open_step = step = step or self._new_step(cached_plan)
                    yield from self._train_part(step, cached_plan, leaves, piece)
                if step is not None and step.is_full:
                    due_step, step, self._open_step = step, None, None
                    yield from self._finish(due_step, DataPosition(epoch=epoch, batches=count))
            if step is not None:
                due_step, step, self._open_step = step, None, None
                yield from self._finish(due_step, DataPosition(epoch=epoch, batches=count))
        finally:
            if step is not None and not self.clock.is_abandoned:
                # An abandoned thread must leave the step alone, because `close` has already closed it on another
                # thread.
                step.close()
        if not count:
            raise no_batch("train", self.task.train, epoch)
        return count

    def _choose_way(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Generator[BurstMark, None, None]:
        """Start running the user's own code, unless something requires cutting the model."""
        if self._may_run_own_code and not is_unbuilt(module):
            budget = self._plans.library.budget
            plan_or_reason = uncaptured(self.task, module, optimizer, budget)
            if isinstance(plan_or_reason, ShardPlan):
                self._make_own_state(module, optimizer, plan_or_reason)
                yield BurstMark.BEGINS
                return
            self.why_cut = plan_or_reason
        in_training_mode(module)
        refuse_lazy(module)
        refuse_gradient_hooks(module)

    def _make_own_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, plan: ShardPlan, *, always_sheds: bool = False
    ) -> None:
        self._share.check(plan)
        previous_state, self._left = self._left, None
        self.state = state = ModelState(
            module, optimizer, plan, self._device, self._host, self._tenant, previous_state, runs_own_code=True
        )
        if previous_state is not None:
            state.adopt_saved(previous_state.optimizer_state(), self._device)
        elif self._saved is None:
            state.adopt_made(self._device)
        self._adopt_saved()
        self.num_shards, self.optimizer_placement = 1, plan.optimizer_placement
        times = UnitTimes({_STEP: step_guess(plan.shards[0].cost.state_bytes)}), UnitTimes({_STEP: 0.0})
        self._train_times, self._evaluation_times = times
        self._direct = WholeModelRunner(
            self.task, module, optimizer, self._gradients, self._streams, always_sheds=always_sheds
        )
        self._bursts = BurstRunner(self._program, self._direct, state, self._streams)
        self._bursts.is_asked_to_end = self._is_asked_to_end

    def _is_asked_to_end(self) -> bool:
        # Looked up at each call, because the pool may replace the callback during a burst.
        return self.is_asked_to_end()

    def _train_directly(
        self, direct: WholeModelRunner, drawn: Iterator[Any], place: DataPosition
    ) -> Generator[Said, None, int]:
        """Do the work of `_train_epoch` with the user's own code; end early where the rest has to be cut.

        The caller resumes this generator inside a burst, on a device that holds all of the trial's state.
        """
        epoch, count, pending = place.epoch, place.batches, 0
        batch, step_start = None, time.perf_counter()
        step_batches: list[Any] = []
        while (next_batch := _next_of(drawn, count, epoch)) is not _END:
            batch = next_batch
            if not self._has_device:
                yield BurstMark.NO_DEVICE
                step_start = time.perf_counter()
            count += 1
            if not pending:
                step_batches, interval = [], self._interval.parts
            step_batches.append(batch)
            try:
                self._train_batch(direct, batch, is_first=not self.progress.steps and not pending)
            except BudgetError:
                if not _may_be_cut(batch) or not direct.undo():
                    raise
                # The undone step will run again as shard units, so its losses must not count twice.
                self._interval, self._undone = WeightedMean(*interval), step_batches
                yield from self._leave_own_code(direct, "a step does not fit, even with its activations on the host")
                return count - len(step_batches)
            pending += 1
            if pending < self.task.accumulate:
                continue
            pending = 0
            yield from self._step_directly(direct, batch, step_start)
            yield from self._after_step(DataPosition(epoch=epoch, batches=count))
            if self._direct is None:
                return count
            yield BurstMark.STEP
            direct, step_start = self._direct, time.perf_counter()
        if not count:
            raise no_batch("train", self.task.train, epoch)
        step_start = yield from self._drawn_all(step_start)
        if pending:
            yield from self._step_directly(direct, batch, step_start)
            yield from self._after_step(DataPosition(epoch=epoch, batches=count))
        return count

    def _drawn_all(self, begun: float) -> Generator[Said, None, float]:
        """Get a device for the work after a pass: the device may be gone since the loader looked for a next batch.

        Args:
            begun: start of the present step, by the clock of `time.perf_counter`.

        Returns:
            The start of the step, without such a wait.
        """
        if self._has_device:
            return begun
        yield BurstMark.NO_DEVICE
        return time.perf_counter()

    def _step_directly(self, direct: WholeModelRunner, batch: Any, begun: float) -> Generator[Said, None, None]:
        """Take the optimizer's step; cut the rest of the training if the step fit only with its activations on the host.

        A model without a finer cut keeps running the user's own code, with activations on the host in every step.
        """
        direct.step()
        self._took(self._train_times, begun)
        if direct.has_followed():
            yield BurstMark.FOLLOWED
        if not direct.has_shed or direct.always_sheds:
            return
        yield from self._leave_own_code(direct, "its activations do not fit beside its state")
        module, optimizer = self.module, self.optimizer
        assert module is not None
        assert optimizer is not None
        piece = next(pieces(batch, self.task.num_pieces)).batch
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
        self.why_cut = why
        CHOICES.info("the trial is cut after step %d: %s", self.progress.steps, why)
        direct.close()
        yield BurstMark.LEAVES
        assert self.module is not None
        assert self.state is not None
        self._direct = None
        self.state.hand_over()
        self._left, self.state = self.state, None
        refuse_gradient_hooks(self.module)

    def _took(self, times: UnitTimes, begun: float) -> None:
        """Record that a step of the user's own code, or a batch evaluated by the code, is over."""
        times.measured(_STEP, time.perf_counter() - begun)
        self.units_run += 1

    def _evaluate_directly(self, direct: WholeModelRunner) -> Generator[Said, None, dict[str, WeightedMean]]:
        """Do the work of `_evaluate` with the user's own code, as long as the batches fit."""
        assert self.module is not None
        means: dict[str, WeightedMean] = {}
        count = 0
        self.module.eval()
        drawn_batches = self._draw(self.task.validate, shuffle=False)
        while True:
            with torch.no_grad():
                # Not around a yield: the caller that resumes the program must record gradients meanwhile.
                batch = next(drawn_batches, _END)
            if not self._has_device:
                yield BurstMark.NO_DEVICE
            if batch is _END:
                break
            start = time.perf_counter()
            refuse_empty(batch, "validate", count)
            streams_mark = self._streams.mark()
            try:
                with torch.no_grad():
                    values = direct.evaluate(batch)
            except BudgetError:
                if not _may_be_cut(batch):
                    raise
                # The shard units evaluate the batch again, and must draw the same numbers.
                self._streams.go_back(streams_mark)
                yield from self._leave_own_code(direct, "a validation batch does not fit beside its state")
                return (yield from self._evaluate_rest(itertools.chain([batch], drawn_batches), means, count))
            for name, value in values.items():
                means.setdefault(name, WeightedMean()).add(value, num_samples(batch))
            count += 1
            self.progress.evaluated_batches += 1
            self._took(self._evaluation_times, start)
            yield BurstMark.STEP
        self.module.train()
        self._evaluated(count)
        return means

    def _evaluated(self, count: int) -> None:
        """Record the number of evaluated batches; refuse a pass without any."""
        if not count:
            assert self.task.validate is not None
            raise no_batch("validate", self.task.validate)
        self.progress.validation_batches = count

    def _train_batch(self, direct: WholeModelRunner, batch: Any, *, is_first: bool) -> None:
        """Run the forward and backward of a batch, in as many pieces as the task asks for."""
        count = self.task.num_pieces
        if count == 1:
            self._train_piece(direct, batch, 1.0, num_samples(batch))
            return
        # Of the first batch alone, as in `train_plain`: later ones may be padded.
        if is_first and self.module is not None:
            self._check_pieces(self.module, batch, count)
        for piece in pieces(batch, count):
            self._train_piece(direct, piece.batch, piece.share, piece.samples)

    def _train_piece(self, direct: WholeModelRunner, batch: Any, share: float, samples: int) -> None:
        loss, backward = direct.train(batch, share)
        if not math.isfinite(loss):
            raise BadLossError(f"the training loss is {loss}")
        backward()
        self._interval.add(loss, samples)

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

    def _check_pieces(self, module: nn.Module, batch: Any, count: int) -> None:
        with self._own_code():
            # A module without real parameters cannot run, but its layers can be inspected.
            if is_unbuilt(module):
                refuse_batch_norm(self.task, module)
            else:
                check_pieces(self.task, module, batch, count)

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
        self._interval.add(step.loss, piece.samples)

    def _together(
        self, step: OptimizerStep, *, ends: bool = False
    ) -> Generator[PendingUnit | ParallelStep, None, None]:
        """Run the batches drawn ahead; `ends` as of `OptimizerStep.together`."""
        samples, self._ahead = self._ahead, []
        yield from step.together(ends=ends)
        for loss, weight in zip(step.losses, samples, strict=True):
            self._interval.add(loss, weight)

    @property
    def _has_several_parts(self) -> bool:
        return self._helpers is not None and self._parts_per_step > 1

    @property
    def _parts_per_step(self) -> int:
        return self.task.accumulate * self.task.num_pieces

    def _new_step(self, kept: CachedPlan) -> OptimizerStep:
        assert self.module is not None
        assert self.optimizer is not None
        strategy = None if self.state is None else self._arrange(kept, self.state)
        if self.state is not None:
            self.state.check_frozen()
        else:
            self._share.check(kept.plan)
            previous_state, self._left = self._left, None
            self.state = ModelState(
                self.module, self.optimizer, kept.plan, self._device, self._host, self._tenant, previous_state
            )
            if previous_state is not None:
                self.state.adopt_saved(previous_state.optimizer_state(), self._device)
            elif self._saved is None:
                self.state.adopt_made(self._device)
            # Otherwise the optimizer draws nothing: a model whose optimizer draws is not cut.
            if len(kept.plan.shards) == 1 or self._device.shares_generator:
                self.state.around_step = partial(self._streams.drawing, keep=True)
            self._adopt_saved()
            self.num_shards = len(kept.plan.shards)
            self.optimizer_placement = kept.plan.optimizer_placement
        self._train_times, self._step_left = kept.times, kept.times.total
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

    def _finish(self, step: OptimizerStep, place: DataPosition) -> Generator[Said, None, None]:
        """Finish an optimizer step, and do the work due after the step."""
        try:
            yield from self._together(step, ends=True)
            if step.is_arranged:
                self._leave_helpers()
            yield from step.finish()
        finally:
            step.close()
        yield from self._after_step(place)

    def _after_step(self, place: DataPosition) -> Generator[Said, None, None]:
        """Do the work due after an optimizer step: scheduler, report, checkpoint."""
        task = self.task
        self.progress.steps += 1
        if task.scheduler_interval == "step":
            self._step_scheduler()
        if task.report_every != "epoch" and self.progress.steps % task.report_every == 0:
            yield from self._report(self.progress.steps, place)
        self._reached(place)

    def _build(self, building: AbstractContextManager[object] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        task = self.task
        with self._own_code(), building or nullcontext():
            module = build_model(task)
            self._claimed = TrialClaim(module)
            groups = list(module.parameters()) if task.param_groups is None else task.param_groups(module)
            self._operators, groups = split_operators(module, groups, task.split_operators)
            optimizer = build_optimizer(task, groups)
            self._claimed.take(optimizer)
            self._operators.check(optimizer)
            check_optimizer(optimizer, module)
            self._scheduler = None if task.scheduler is None else task.scheduler(optimizer)
        self.module, self.optimizer = module, optimizer
        if self._keeper is not None or self._beginning is not None:
            self._built = TrialObjects(task=task, module=module, optimizer=optimizer, scheduler=self._scheduler)
        return module, optimizer

    def _begin(self) -> DataPosition:
        """Restore the checkpoint, if any; return the place in the data where training begins or resumes."""
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return DataPosition()
        assert self._built is not None
        refuse_lazy(self._built.module)
        state = decoded(beginning.saved)
        if beginning.only_weights:
            self._built.restore_weights(state)
            return DataPosition()
        task_changes = self._built.compare(state, allows_changes=beginning.allows_changes)
        with self._own_code():
            self._built.restore(state)
        # The optimizer's state needs groups, and groups need a plan.
        self._saved = {name: state[name] for name in ("optimizer", "trained", "made_for")}
        place = place_after(state, task_changes)
        # A changed seed asks for other random numbers: the streams then begin at the new seed.
        if not any(setting == "task.seed" for setting, _, _ in task_changes):
            self._streams.restore(state["streams"])
        if not any(is_of_the_pass(change) for change in task_changes):
            self._feed.restore(state["feed"])
        self._gradients.restore(state["gradients"])
        self._interval = WeightedMean(*state["interval"])
        self.progress.restore(state["progress"])
        self.history, self.metrics, self.units_run = state["history"], state["metrics"], state["units_run"]
        # Reports continue the seconds of the interrupted run.
        self._started = time.perf_counter() - state["seconds"]
        self._pass_began = state["pass_began"]
        count = state.get("split_batches")
        # The number from the beginning, because another number of pieces rounds differently.
        if self.task.split_batches == "auto" and count is not None:
            self.task = self._plans.task = replace(self.task, split_batches=count)
        return place

    def _adopt_saved(self) -> None:
        """Restore the parts of a checkpoint that need a plan first: the optimizer's state and frozen parameters."""
        restored_state, self._saved = self._saved, None
        if restored_state is None:
            return
        assert self._built is not None
        if self.state is not None:
            self.state.adopt_saved(restored_state["optimizer"], self._device)
        # No step has run since the restart, so there are no groups.
        else:
            assert self.module is not None
            assert self.optimizer is not None
            named = dict(self.module.named_parameters())
            self.optimizer.state.update({named[name]: entries for name, entries in restored_state["optimizer"].items()})
        self._built.restore_frozen(restored_state)

    def _reached(self, place: DataPosition, *, at_report: bool = False) -> None:
        """Tell the keeper that the trial is between two steps and may be saved."""
        if self._keeper is None or (place.batches and not place.is_over and not self._feed.may_skip):
            return
        self._place = place
        try:
            last_epoch = self.task.epochs - 1
            is_last = place.epoch > last_epoch or (place.is_over and place.epoch == last_epoch)
            self._keeper.reached(self, steps=self.progress.steps, at_report=at_report, is_last=is_last)
        finally:
            self._place = None

    def snapshot(self) -> TrialStateSnapshot:
        """Return the state between two steps, in place and without copies.

        Raises:
            CheckpointError: the state has a value that no checkpoint can hold.
        """
        assert self._built is not None
        assert self._place is not None, "a step is under way"
        if self.state is not None:
            # Updates on the host may still be under way.
            self.state.settle()
        in_pass = self._place.batches > 0 and not self._place.is_over
        # While values are read, a moved tensor's old memory has to stay.
        with self._reading():
            facts, tensors = encoded(
                self._built.module,
                self._built.state()
                | self._not_adopted()
                | {
                    "place": asdict(self._place),
                    "streams": self._streams.state(),
                    "feed": self._feed.states(),
                    "pass_began": self._pass_began if in_pass else {},
                    "gradients": self._gradients.state(),
                    "interval": self._interval.parts,
                    "progress": self.progress.state(),
                    "history": self.history,
                    "metrics": self.metrics,
                    "units_run": self.units_run,
                    "seconds": time.perf_counter() - self._started,
                    "split_batches": self.split_batches,
                },
            )
        return TrialStateSnapshot(facts=facts, tensors=tensors, state=self.state)

    def _not_adopted(self) -> dict[str, Any]:
        """Return optimizer state that a resumed trial has not adopted yet.

        A trial saved at the end of a pass leaves the pass before there is a plan, and so before `_adopt_saved`.
        """
        return {} if self._saved is None else {name: self._saved[name] for name in ("optimizer", "trained")}

    @property
    def may_be_saved(self) -> bool:
        """Whether the trial waits between two steps."""
        return self._place is not None

    def _draw(self, handle: Any, *, shuffle: bool) -> Generator[Any, None, None]:
        """Draw the batches of one pass, each with the trial's own streams and not before the batch is needed."""
        return self._feed.draw(handle, shuffle=shuffle)

    def _draw_pass(self, skipped: int) -> Generator[Any, None, None]:
        """Draw the batches of a training pass, without the batches trained on before the checkpoint."""
        if not skipped:
            self._pass_began = {} if self._keeper is None else self._data_state()
            return self._draw(self.task.train, shuffle=True)
        current_state, pass_start = self._data_state(), self._pass_began

        def go_on() -> None:
            # The repeated draws have moved the streams away from their positions in the checkpoint.
            self._streams.restore(current_state["streams"])
            self._feed.restore(current_state["feed"])

        self._streams.restore(pass_start["streams"])
        # Copied, because drawing changes the values in place, and the next checkpoint of the pass saves them again.
        self._feed.restore(copied(pass_start["feed"]))
        return self._feed.draw(self.task.train, shuffle=True, skip=SkippedBatches(skipped, go_on))

    def _data_state(self) -> dict[str, Any]:
        """Return the positions of all streams and samplers on which the next batches depend."""
        return {"streams": self._streams.state(), "feed": copied(self._feed.states())}

    def _report(self, step: int, place: DataPosition) -> Generator[Said, None, None]:
        metrics = {"train_loss": self._interval.value()}
        self._interval = WeightedMean()
        if self.task.validate is not None:
            # Whether a pass may be skipped is asked about the training pass, not about the validation pass within.
            may_skip = self._feed.may_skip
            means = yield from self._evaluate()
            self._feed.may_skip = may_skip
            metrics |= reported_names({name: mean.value() for name, mean in means.items()})
        check_reported(self.task.metrics, metrics)
        self.metrics = metrics
        seconds = time.perf_counter() - self._started
        self.history.append({"step": step, "epoch": place.epoch, "seconds": seconds, **metrics})
        # Before the report is delivered: after a crash the report is repeated rather than lost.
        self._reached(place, at_report=True)
        if not place.batches or place.is_over or self._feed.may_skip:
            # The trial may be saved while its report waits for an answer.
            self._place = place
        yield PendingReport(step=step, metrics=dict(metrics))
        self._place = None

    def _make_state(self) -> None:
        """Plan a training step without running the step, for a trial that resumes with an evaluation."""
        assert self.module is not None
        assert self.optimizer is not None
        data_state = self._data_state()
        drawn_batches = self._draw(self.task.train, shuffle=True)
        try:
            batch = next(drawn_batches)
        finally:
            drawn_batches.close()
        self._settle_pieces(self.module, self.optimizer, batch)
        piece = next(pieces(batch, self.task.num_pieces))
        leaves = batches.flatten(piece.batch)
        self._new_step(self._plans.find(self.module, self.optimizer, None, piece.batch, leaves, "train")).close()
        # The batch was drawn only to make the plan; the next training pass must draw from the same position again.
        self._streams.restore(data_state["streams"])
        self._feed.restore(data_state["feed"])

    def _evaluate(self) -> Generator[Said, None, dict[str, WeightedMean]]:
        if self._direct is not None:
            return (yield from self._evaluate_directly(self._direct))
        return (yield from self._evaluate_rest(self._draw(self.task.validate, shuffle=False), {}, 0))

    def _evaluate_rest(
        self, drawn: Iterator[Any], means: dict[str, WeightedMean], count: int
    ) -> Generator[PendingUnit, None, dict[str, WeightedMean]]:
        """Evaluate the remaining batches of a pass by shard units."""
        if self.state is None:
            self._make_state()
        assert self.module is not None
        assert self.optimizer is not None
        assert self.state is not None
        while True:
            with torch.no_grad():  # as in a plain loop, whose validation data may ask
                batch = next(drawn, _END)
            if batch is _END:
                break
            refuse_empty(batch, "validate", count)
            leaves = batches.flatten(batch)
            cached_plan = self._plans.find(self.module, self.optimizer, self.state, batch, leaves, "evaluate")
            self._evaluation_times, self._step_left = cached_plan.times, cached_plan.times.total
            step = EvaluationBatch(cached_plan.plan, cached_plan.times, self.state, leaves, self._streams, self._device)
            try:
                yield from step.units()
            finally:
                step.close()
            for name, value in step.metrics.items():
                means.setdefault(name, WeightedMean()).add(value, num_samples(batch))
            count += 1
            self.progress.evaluated_batches += 1
        self._evaluated(count)
        self.module.train()
        return means

    def _step_scheduler(self) -> None:
        if self._scheduler is None:
            return
        saved_state, objects = self._saved, self._built
        with self._own_code(), nullcontext() if saved_state is None or objects is None else objects.frozen(saved_state):
            if not isinstance(self._scheduler, ReduceLROnPlateau):
                self._scheduler.step()
                return
            name = self.task.metrics[0]
            if name not in self.metrics:
                raise MetricError(
                    f"ReduceLROnPlateau needs {name!r} after step {self.progress.steps}, but nothing has been reported yet; "
                    "step it per epoch (scheduler_interval='epoch') and report at least as often"
                )
            self._scheduler.step(self.metrics[name])

    def _own_code(self) -> AbstractContextManager[object]:
        """Context of the user's code: the trial's random streams, no concurrent capture, and tensors that stay in place."""
        if self._has_device:
            # A running burst has already entered all of the contexts below.
            return _NOTHING
        stack = ExitStack()
        stack.enter_context(self._reading())
        stack.enter_context(self._streams.everything())
        stack.enter_context(GATE.shared())
        return stack

    @property
    def _has_device(self) -> bool:
        """Whether a burst is under way and holds a device."""
        return self._bursts is not None and self._bursts.has_device

    def _waiting(self) -> AbstractContextManager[object]:
        """Return the context of the wait for a loader's workers."""
        return self._bursts.waiting() if self._bursts is not None and self._has_device else nullcontext()

    def _reading(self) -> AbstractContextManager[object]:
        """Return the context of code that may read the trial's tensors between units."""
        return nullcontext() if self.state is None else self.state.readers.reading()


def run_unit(
    unit: PendingUnit,
    device: Device,
    pager: Pager,
    instrument: Callable[[], AbstractContextManager[Any]] | None,
    watch: DeviceStopwatch | None = None,
) -> float:
    """Run a unit on the calling thread, which must be the device's worker.

    Args:
        unit: the due unit.
        device: device to run on.
        pager: pager of the device.
        instrument: returns a context manager entered around the unit.
        watch: stopwatch of the device, for callers that ask when the unit ended on the device.

    Returns:
        Device seconds of the unit, without waits for bytes and for other trials' streams: the estimate for the trial's
        next units must not depend on the choice of device.
    """
    with nullcontext() if instrument is None else instrument():
        watch = watch or device.stopwatch()
        with watch.running():
            waited_seconds = unit.run(device, pager)
        # Still inside the instrument: on a GPU, the unit's kernels may be running.
        device.synchronize()
        # On a GPU the stopwatch runs on the device and the wait on the host, so the difference can be negative.
        return max(0.0, watch.seconds - waited_seconds)


def refuse_lazy(module: nn.Module) -> None:
    """Refuse a module whose parameters have no shape yet, where planning needs the sizes.

    Raises:
        TaskError: names the first such parameter.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise TaskError(
                f"parameter {name!r} is lazy: its shape is unknown until a forward; run one batch through the module in "
                "model=, or give the sizes"
            )


def in_training_mode(module: nn.Module) -> None:
    """Set a module to training mode before a capture, unless the module is in training mode."""
    # `train` may be the user's own and keep count, and a plain loop calls the method only where a pass begins.
    if not all(part.training for part in module.modules()):
        module.train()


def _may_be_cut(batch: Any) -> bool:
    """Whether a captured step could take the batch."""
    try:
        batches.flatten(batch)
    except TaskError:
        return False
    return True


def _next_of(drawn: Iterator[Any], number: int, epoch: int) -> Any:
    """Return the next training batch, or the end marker; refuse a batch without samples."""
    batch = next(drawn, _END)
    if batch is not _END:
        refuse_empty(batch, "train", number, epoch)
    return batch
