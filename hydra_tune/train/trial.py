"""`Trial`: what one trial does over time, as a sequence of shard units and reports.

The training loop is written once, as a generator that reads like the plain loop and stops wherever a shard unit is due; the
pool runs the unit on a device of its choice and lets the generator go on. Knows nothing of other trials or of the schedule.
"""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hydra_tune.devices.device import Device
from hydra_tune.errors import BadLossError, MetricError, TaskError
from hydra_tune.memory.host import HostTier
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.tenant import Tenant
from hydra_tune.shard import batch as batches
from hydra_tune.shard.gate import GATE
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.shard.operators import SplitOperators, split_operators
from hydra_tune.shard.packing import CHOICES
from hydra_tune.shard.piece_count import divisors
from hydra_tune.shard.unbuilt import is_unbuilt
from hydra_tune.task import TrainTask
from hydra_tune.train.arrange import arrange
from hydra_tune.train.capture import Beginning, Built, Place, decoded, encoded, place_after
from hydra_tune.train.clock import Progress, UnitTimes
from hydra_tune.train.data import no_batch, num_batches, num_samples, refuse_empty
from hydra_tune.train.described import copied, is_of_the_pass
from hydra_tune.train.drawing import DrawClock
from hydra_tune.train.feed import Feed, Skip
from hydra_tune.train.gradients import Gradients
from hydra_tune.train.helpers import Arrangement, Helpers, drawn_bytes
from hydra_tune.train.hooks import refuse_gradient_hooks
from hydra_tune.train.host_share import HostShare, fixed_bytes, largest_bytes
from hydra_tune.train.mean import Mean
from hydra_tune.train.piece_choice import piece_count
from hydra_tune.train.pieces import Piece, check_pieces, pieces, refuse_batch_norm
from hydra_tune.train.plans import Kept, TrialPlans
from hydra_tune.train.shared_times import SharedTimes
from hydra_tune.train.snapshot import Keeper, Snapshot
from hydra_tune.train.spread import Spread
from hydra_tune.train.state import ModelState, check_optimizer
from hydra_tune.train.step import EvaluationStep, PendingUnit
from hydra_tune.train.streams import RandomStreams, draws_between
from hydra_tune.train.training import OptimizerStep
from hydra_tune.train.training_batch import Part

_IN_TRAINING: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules of trials under way in this process
_CLAIM = threading.Lock()
_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report is due: the trial waits for an answer.

    Attributes:
        step: the epoch, from 0, or with `report_every=n` the optimizer steps done.
        metrics: `train_loss` and `val_<name>`.
    """

    step: int
    metrics: dict[str, float]


class Trial:
    """One training run under way.

    Args:
        task: what to train.
        library: where plans come from.
        device: any device of the pool, for host memory.
        helpers: asked before a step whose batches may run side by side, if anybody could help.
        host: counts host copies and sends some to disk; None: the host has room for all.
        tenant: the trial, for `host`.
        times: of the units of plans, which the trials of a pool measure together; None: this one does alone.
        beginning: what it goes on from; None: it begins anew.
        keeper: who saves it between its steps; None: nobody does.
    """

    def __init__(
        self,
        task: TrainTask,
        library: PlanLibrary,
        device: Device,
        helpers: Helpers | None = None,
        host: HostTier | None = None,
        tenant: Tenant | None = None,
        times: SharedTimes | None = None,
        *,
        beginning: Beginning | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.task = task
        self.history: list[dict[str, float]] = []
        self.compute_seconds = 0.0
        self.metrics: dict[str, float] = {}
        self.units_run = 0
        self.num_shards = 0
        self.optimizer_placement: str | None = None
        self.pieces_why: str | None = None  # where their number was chosen here
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.state: ModelState | None = None
        self.progress = Progress(
            epochs=task.epochs,
            accumulate=task.accumulate,
            report_every=None if task.report_every == "epoch" else task.report_every,
            batches=num_batches(task.train, task.batch_size),
            validation=0 if task.validate is None else num_batches(task.validate, task.batch_size),
        )
        self._claimed: nn.Module | None = None
        self._device = device
        self._helpers = helpers
        self._lock = threading.Lock()
        self._host = host
        self._tenant = tenant
        self._streams = RandomStreams(task.seed)
        self._gradients = Gradients(task)
        self._feed = Feed(task.batch_size, self._own_code, self._streams.mark_of_all, self._torch_alone)
        self._scheduler: Any = None
        self._beginning = beginning
        self._keeper = keeper
        self._built: Built | None = None
        self._saved: dict[str, Any] | None = None  # until there are groups for the optimizer's state
        self._place: Place | None = None  # while the trial may be saved
        self._pass_began: dict[str, Any] = {}
        self._operators = SplitOperators()
        self._share = HostShare(host, tenant)
        self._plans = TrialPlans(task, library, self._streams, device, self._share, times or SharedTimes())
        self._interval = Mean()
        self._started = time.perf_counter()
        self._train_times = UnitTimes({})
        self._evaluation_times = UnitTimes({})
        self._step_left = 0.0
        self._ahead: list[int] = []  # samples of the batches that are drawn ahead
        self._open_step: OptimizerStep | None = None  # while its batches are drawn
        self._program = self._run()
        self.outcome = "completed"

    def advance(self) -> PendingUnit | Spread | Report | None:
        """Go on to the next unit, batches side by side, or report; None at the end.

        Runs the trial's own code: not inside a unit, nor before all units of a `Spread` have run.
        """
        return next(self._program, None)

    def prepare(self, building: AbstractContextManager[object] | None = None) -> tuple[Kept, batches.Leaves]:
        """Build the model, draw the first batch and make its plan, and no more: for whoever wants to know what would run.

        Args:
            building: entered around the task's factories.

        Returns:
            The plan, and the batch or its first piece.
        """
        for handle in (self.task.train, self.task.validate):
            self._feed.check(handle)
        module, optimizer = self._build(building)
        for batch in self._draw(self.task.train, shuffle=True):
            refuse_empty(batch, "train", 0, 0)
            self._settle_pieces(module, optimizer, batch)
            piece = next(pieces(batch, self.task.num_pieces))
            leaves = batches.flatten(piece.batch)
            kept = self._plans.find(module, optimizer, None, piece.batch, leaves, "train")
            return kept, leaves
        raise no_batch("train", self.task.train, 0)

    def finished(self, unit: PendingUnit, seconds: float) -> None:
        """A unit took so long."""
        with self._lock:
            self.compute_seconds += seconds
            self.units_run += unit.kind != "sum"  # which is no unit where batches run one after the other
            self._step_left = max(0.0, self._step_left - unit.seconds)
            unit.times.measured(unit.key, seconds)

    @property
    def clock(self) -> DrawClock:
        """Says for how long the trial's loader has been waited for."""
        return self._feed.clock

    @property
    def activations(self) -> tuple[str, ...]:
        """What is done with the activations of each shard but the last until its backward; empty before the first step."""
        state = self.state
        return () if state is None else tuple(state.activations_of(shard) for shard in state.layout.plan.shards[:-1])

    @property
    def split_batches(self) -> int | None:
        """Pieces that each batch is cut into; None where that has not been chosen yet."""
        return None if self.task.split_batches == "auto" else self.task.split_batches

    @property
    def unit_times(self) -> UnitTimes:
        """Seconds of the units of one optimizer step, as known now."""
        return self._train_times

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step, as known now."""
        return self._train_times.total

    @property
    def alike(self) -> str | None:
        """What the times of its steps are known by, where it measures them together with other trials."""
        return self._train_times.name

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come, as known now."""
        steps = self.progress.steps_left * self._train_times.total
        evaluation = self.progress.evaluated_batches_left * self._evaluation_times.total
        return self._step_left + max(0.0, steps - self._train_times.total) + evaluation

    @property
    def units_planned(self) -> int | None:
        """Units of the whole run; None where the data does not tell."""
        steps, evaluated = self.progress.num_steps, self.progress.num_evaluated_batches
        if steps is None or evaluated is None:
            return None
        # Before the first evaluation its units are taken to be as many as the shards.
        per_batch = len(self._evaluation_times) or self.num_shards
        return steps * len(self._train_times) + evaluated * per_batch

    @property
    def host_bytes(self) -> int:
        """Host memory the trial's state and the values between its units need."""
        if self.state is None:
            return 0
        shards = self.state.layout.plan.shards
        return self.state.nbytes + sum(shard.cost.held_bytes for shard in shards)

    @property
    def fixed_host_bytes(self) -> int:
        """Host memory that cannot go to disk, as long as the trial lives: what whole units spill of their activations."""
        return 0 if self.state is None else fixed_bytes(self.state.layout.plan)

    @property
    def largest_host_bytes(self) -> int:
        """The most that one block of the trial takes."""
        return 0 if self.state is None else largest_bytes(self.state.layout.plan)

    def reserve_host(self) -> None:
        """Take the host memory that cannot go to disk, until the trial is closed."""
        self._share.take()

    def close(self, *, keep: bool) -> None:
        """End the trial: values of the step go; the state comes home, or goes too."""
        try:
            if self.clock.is_abandoned:  # its program hangs in the loader, and would be closed by nobody
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
            if self._claimed is not None:
                _IN_TRAINING.discard(self._claimed)
            self._claimed = None
            self._plans.clear()
            self._let_go()

    def _close_open_step(self) -> None:
        step, self._open_step = self._open_step, None
        if step is not None:
            step.close()

    def _let_go(self) -> None:
        """Of all that holds weights: a trial has cycles, so that it may be there until the garbage collector comes by."""
        self.module, self.optimizer, self.state = None, None, None
        self._scheduler, self._operators, self._helpers = None, SplitOperators(), None
        self._built, self._beginning, self._saved, self._pass_began = None, None, None, {}

    def _hand_over(self, state: ModelState) -> None:
        try:
            state.hand_over()
            self._operators.restore(state.optimizer)
        except BaseException:  # a disk that cannot be read: nothing of the trial must stay behind
            state.drop()
            raise

    def _run(self) -> Generator[PendingUnit | Spread | Report, None, None]:
        """The training loop, to its end or to a bad loss."""
        try:
            yield from self._train()
        except BadLossError as error:
            if self.task.on_bad_loss == "fail":
                raise BadLossError(
                    f"{error} in step {self.progress.steps + 1} (epoch {self.progress.epoch}); lower the learning rate, clip "
                    "the gradients (max_grad_norm), or let such trials be pruned (on_bad_loss='prune')"
                ) from None
            self.outcome = "pruned"

    def _train(self) -> Generator[PendingUnit | Spread | Report, None, None]:
        task = self.task
        for handle in (task.train, task.validate):
            self._feed.check(handle)
        module, optimizer = self._build()
        first = self._begin()
        for epoch in range(first.epoch, task.epochs):
            self.progress.epoch = epoch
            place = first if epoch == first.epoch else Place(epoch=epoch)
            if not place.is_over:
                self.progress.batches_per_epoch = yield from self._train_epoch(module, optimizer, place)
                if task.report_every == "epoch":
                    over = Place(epoch=epoch, batches=self.progress.batches_per_epoch, is_over=True)
                    yield from self._report(epoch, over)
            if task.scheduler_interval == "epoch":
                self._step_scheduler()
            if epoch + 1 == task.epochs:
                self._adopt_saved()  # before it is saved: nothing may have been left to train
            self._reached(Place(epoch=epoch + 1))
        self._adopt_saved()

    def _train_epoch(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, place: Place
    ) -> Generator[PendingUnit | Spread | Report, None, int]:
        """One pass over the training data, or the rest of one; returns the number of its batches."""
        epoch, count = place.epoch, place.batches
        step: OptimizerStep | None = None
        drawn = self._draw_pass(count)
        try:
            while True:
                try:
                    batch = _next_of(drawn, count, epoch)
                except Exception:
                    if step is not None:  # the error comes after what a plain loop has run by now
                        yield from self._together(step)
                    raise
                if batch is _END:
                    break
                count += 1
                self._settle_pieces(module, optimizer, batch)
                for piece in pieces(batch, self.task.num_pieces):
                    leaves = batches.flatten(piece.batch)
                    kept = self._plans.find(module, optimizer, self.state, piece.batch, leaves, "train")
                    self._open_step = step = step or self._new_step(kept)
                    yield from self._train_part(step, kept, leaves, piece)
                if step is not None and step.is_full:
                    done, step, self._open_step = step, None, None
                    yield from self._finish(done, Place(epoch=epoch, batches=count))
            if step is not None:
                done, step, self._open_step = step, None, None
                yield from self._finish(done, Place(epoch=epoch, batches=count))
        finally:
            if step is not None and not self.clock.is_abandoned:
                step.close()
        if not count:
            raise no_batch("train", self.task.train, epoch)
        return count

    def _settle_pieces(self, module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Refuse a task whose batches cannot be split; where it is open into how many pieces, choose. The first batch tells."""
        if self.task.split_batches == 1 or self.state is not None:
            return
        if self.task.split_batches != "auto":
            self._check_pieces(module, batch, self.task.num_pieces)
            return
        fewest = divisors(num_samples(batch))[:2][-1]
        self._check_pieces(module, batch, fewest)
        with self._streams.everything():
            choice = piece_count(self.task, self._plans.library, module, optimizer, batch)
        CHOICES.info("%s", choice.reason)
        self.task = self._plans.task = replace(self.task, split_batches=choice.count)
        self.pieces_why = choice.reason
        if choice.count not in (1, fewest):
            self._check_pieces(module, batch, choice.count)

    def _check_pieces(self, module: nn.Module, batch: Any, count: int) -> None:
        with self._own_code():
            if is_unbuilt(module):  # that much can be told of what cannot be run
                refuse_batch_norm(self.task, module)
            else:
                check_pieces(self.task, module, batch, count)

    def _train_part(
        self, step: OptimizerStep, kept: Kept, leaves: batches.Leaves, piece: Piece
    ) -> Generator[PendingUnit | Spread, None, None]:
        """One batch, or a piece of one: now, or kept until it can run with the next ones."""
        plan = kept.plan
        part = Part(plan=plan, times=kept.times, leaves=leaves, share=piece.share, ends_batch=piece.is_last)
        if kept.draws is not None and step.takes(plan):
            step.draw_ahead(part, kept.draws)
            self._ahead.append(piece.samples)
            if step.has_drawn_enough:
                yield from self._together(step)
            return
        yield from self._together(step)
        before = None
        if not kept.is_counted and self._has_several_parts and plan.may_be_split and self._device.shares_generator:
            before = self._streams.position()
        yield from step.batch(part)
        if before is not None:
            kept.draws, kept.is_counted = draws_between(before, self._streams.position()), True
        self._interval.add(step.loss, piece.samples)

    def _together(self, step: OptimizerStep, *, ends: bool = False) -> Generator[PendingUnit | Spread, None, None]:
        """Run what was kept; `ends` as of `OptimizerStep.together`."""
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

    def _new_step(self, kept: Kept) -> OptimizerStep:
        assert self.module is not None
        assert self.optimizer is not None
        how = None if self.state is None else self._arrange(kept, self.state)
        if self.state is not None:
            self.state.check_frozen()
        else:
            self._share.check(kept.plan)
            self.state = ModelState(self.module, self.optimizer, kept.plan, self._device, self._host, self._tenant)
            if self._device.shares_generator:  # to set a GPU's for each update would take too long
                self.state.around_step = partial(self._streams.drawing, self._device, keep=True)
            self._adopt_saved()
            self.num_shards = len(kept.plan.shards)
            self.optimizer_placement = kept.plan.optimizer_placement
        self._train_times, self._step_left = kept.times, kept.times.total
        return OptimizerStep(self.task.accumulate, self.state, self._streams, self._device, self._gradients, how)

    def _arrange(self, kept: Kept, state: ModelState) -> Arrangement | None:
        """How the batches of the next step run together; None: one after the other."""
        if self._helpers is None or not self._has_several_parts or kept.draws is None:
            return None
        how = arrange(kept, state, self._helpers, self._parts_per_step)
        drawn = 0 if how is None else (how.width - 1) * drawn_bytes(kept.plan, how.drawn_for_each)
        if how is not None and not self._share.change([state.layout.plan, *self._plans.all, kept.plan], drawn):
            self._leave_helpers()
            self._helpers.decline(how.way)
            return None
        return how

    def _leave_helpers(self) -> None:
        if self._helpers is not None:
            self._helpers.leave()
        if self.state is not None:
            self._share.change([self.state.layout.plan, *self._plans.all])

    def _finish(self, step: OptimizerStep, place: Place) -> Generator[PendingUnit | Spread | Report, None, None]:
        """The end of an optimizer step, and what is due after it."""
        try:
            yield from self._together(step, ends=True)
            if step.is_arranged:
                self._leave_helpers()
            yield from step.finish()
        finally:
            step.close()
        yield from self._after_step(place)

    def _after_step(self, place: Place) -> Generator[PendingUnit | Spread | Report, None, None]:
        """What is due after an optimizer step."""
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
            module = task.model()
            if not isinstance(module, nn.Module):
                raise TaskError(f"model= must build a torch.nn.Module, but returned {type(module).__name__}")
            _refuse_lazy(module)
            self._claim(module)
            groups = list(module.parameters()) if task.param_groups is None else task.param_groups(module)
            self._operators, groups = split_operators(module, groups, task.split_operators)
            optimizer = task.optimizer(groups)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TaskError(
                    f"optimizer= must build a torch.optim.Optimizer, but returned {type(optimizer).__name__}"
                )
            self._operators.check(optimizer)
            check_optimizer(optimizer, module)
            self._scheduler = None if task.scheduler is None else task.scheduler(optimizer)
            refuse_gradient_hooks(module)
        module.train()
        self.module, self.optimizer = module, optimizer
        if self._keeper is not None or self._beginning is not None:
            self._built = Built(task=task, module=module, optimizer=optimizer, scheduler=self._scheduler)
        return module, optimizer

    def _begin(self) -> Place:
        """Take over what the trial goes on from; returns where that is."""
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return Place()
        assert self._built is not None
        state = decoded(beginning.saved)
        if beginning.only_weights:
            self._built.restore_weights(state)
            return Place()
        found = self._built.compare(state, allows_changes=beginning.allows_changes)
        with self._own_code():
            self._built.restore(state)
        self._saved = {name: state[name] for name in ("optimizer", "trained", "made_for")}
        place = place_after(state, found)
        if not any(what == "task.seed" for what, _, _ in found):
            self._streams.restore(state["streams"])
        if not any(is_of_the_pass(change) for change in found):
            self._feed.restore(state["feed"])
        self._gradients.restore(state["gradients"])
        self._interval = Mean(*state["interval"])
        self.progress.restore(state["progress"])
        self.history, self.metrics, self.units_run = state["history"], state["metrics"], state["units_run"]
        self._started = time.perf_counter() - state["seconds"]
        self._pass_began = state["pass_began"]
        count = state.get("split_batches")
        if self.task.split_batches == "auto" and count is not None:  # as it began: another number rounds differently
            self.task = self._plans.task = replace(self.task, split_batches=count)
        return place

    def _adopt_saved(self) -> None:
        """Take over what could not be before there was a plan, where the trial goes on with something."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        assert self._built is not None
        if self.state is not None:
            self.state.adopt_saved(saved["optimizer"], self._device)
        else:  # nothing was left to train
            assert self.module is not None
            assert self.optimizer is not None
            named = dict(self.module.named_parameters())
            self.optimizer.state.update({named[name]: entries for name, entries in saved["optimizer"].items()})
        self._built.restore_frozen(saved)

    def _reached(self, place: Place, *, at_report: bool = False) -> None:
        """The trial is between two steps, and may be saved."""
        if self._keeper is None or (place.batches and not place.is_over and not self._feed.may_skip):
            return
        self._place = place
        try:
            last = self.task.epochs - 1
            is_last = place.epoch > last or (place.is_over and place.epoch == last)
            self._keeper.reached(self, steps=self.progress.steps, at_report=at_report, is_last=is_last)
        finally:
            self._place = None

    def snapshot(self) -> Snapshot:
        """The state between two steps, where it lies.

        Raises:
            CheckpointError: it has something that no checkpoint can hold.
        """
        assert self._built is not None
        assert self._place is not None, "a step is under way"
        if self.state is not None:
            self.state.settle()  # updates on the host may still be under way
        in_pass = self._place.batches > 0 and not self._place.is_over
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
        return Snapshot(facts=facts, tensors=tensors, state=self.state)

    def _not_adopted(self) -> dict[str, Any]:
        """What the trial goes on from and has not taken over yet: a pass that was at its end is left before there is a plan."""
        return {} if self._saved is None else {name: self._saved[name] for name in ("optimizer", "trained")}

    @property
    def may_be_saved(self) -> bool:
        """Whether the trial waits between two steps."""
        return self._place is not None

    def _claim(self, module: nn.Module) -> None:
        """A module belongs to one trial at a time."""
        with _CLAIM:
            if module in _IN_TRAINING:
                raise TaskError(
                    "model= returned a module that another trial is training; let it build a new one each time"
                )
            _IN_TRAINING.add(module)
        self._claimed = module

    def _draw(self, handle: Any, *, shuffle: bool) -> Generator[Any, None, None]:
        """The batches of one pass, each drawn with the trial's own streams and not before it is needed."""
        return self._feed.draw(handle, shuffle=shuffle)

    def _draw_pass(self, skipped: int) -> Generator[Any, None, None]:
        """The batches of a training pass, but for those that the trial had before it was saved."""
        if not skipped:
            self._pass_began = {} if self._keeper is None else self._data_state()
            return self._draw(self.task.train, shuffle=True)
        now, began = self._data_state(), self._pass_began

        def go_on() -> None:
            self._streams.restore(now["streams"])
            self._feed.restore(now["feed"])

        self._streams.restore(began["streams"])
        self._feed.restore(copied(began["feed"]))
        return self._feed.draw(self.task.train, shuffle=True, skip=Skip(skipped, go_on))

    def _data_state(self) -> dict[str, Any]:
        """Where all stands that the next batches depend on."""
        return {"streams": self._streams.state(), "feed": copied(self._feed.states())}

    def _report(self, step: int, place: Place) -> Generator[PendingUnit | Report, None, None]:
        metrics = {"train_loss": self._interval.value()}
        self._interval = Mean()
        if self.task.validate is not None:
            means = yield from self._evaluate()
            metrics |= {f"val_{name}": mean.value() for name, mean in means.items()}
        for name in self.task.metrics:
            if name not in metrics:
                raise MetricError(f"metric {name!r} is not reported; reported are {', '.join(metrics)}")
        self.metrics = metrics
        seconds = time.perf_counter() - self._started
        self.history.append({"step": step, "epoch": place.epoch, "seconds": seconds, **metrics})
        self._reached(place, at_report=True)
        if not place.batches or place.is_over or self._feed.may_skip:
            self._place = place  # whoever is asked to answer may save the trial meanwhile
        yield Report(step=step, metrics=dict(metrics))
        self._place = None

    def _make_state(self) -> None:
        """Plan a training step without taking it, for a trial that goes on with an evaluation."""
        assert self.module is not None
        assert self.optimizer is not None
        now = self._data_state()
        drawn = self._draw(self.task.train, shuffle=True)
        try:
            batch = next(drawn)
        finally:
            drawn.close()
        self._settle_pieces(self.module, self.optimizer, batch)
        piece = next(pieces(batch, self.task.num_pieces))
        leaves = batches.flatten(piece.batch)
        self._new_step(self._plans.find(self.module, self.optimizer, None, piece.batch, leaves, "train")).close()
        self._streams.restore(now["streams"])
        self._feed.restore(now["feed"])

    def _evaluate(self) -> Generator[PendingUnit, None, dict[str, Mean]]:
        if self.state is None:
            self._make_state()
        assert self.module is not None
        assert self.optimizer is not None
        assert self.state is not None
        means: dict[str, Mean] = {}
        count = 0
        for batch in self._draw(self.task.validate, shuffle=False):
            refuse_empty(batch, "validate", count)
            leaves = batches.flatten(batch)
            kept = self._plans.find(self.module, self.optimizer, self.state, batch, leaves, "evaluate")
            self._evaluation_times, self._step_left = kept.times, kept.times.total
            step = EvaluationStep(kept.plan, kept.times, self.state, leaves, self._streams, self._device)
            try:
                yield from step.units()
            finally:
                step.close()
            for name, value in step.metrics.items():
                means.setdefault(name, Mean()).add(value, num_samples(batch))
            count += 1
            self.progress.evaluated_batches += 1
        if not count:
            assert self.task.validate is not None
            raise no_batch("validate", self.task.validate)
        self.progress.validation_batches = count
        self.module.train()
        return means

    def _step_scheduler(self) -> None:
        if self._scheduler is None:
            return
        saved, built = self._saved, self._built
        with self._own_code(), nullcontext() if saved is None or built is None else built.frozen(saved):
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
        """Around the user's code: the trial's random streams, no capture beside it, and tensors that do not go away."""
        stack = ExitStack()
        stack.enter_context(self._reading())
        stack.enter_context(self._streams.everything())
        stack.enter_context(GATE.shared())
        return stack

    @contextmanager
    def _torch_alone(self) -> Iterator[None]:
        """Around what draws from torch's stream alone, and is not the user's code."""
        with self._streams.torch_alone(), GATE.shared():
            yield

    def _reading(self) -> AbstractContextManager[object]:
        """Around code that may read the trial's tensors between units."""
        return nullcontext() if self.state is None else self.state.readers.reading()


def run_unit(
    unit: PendingUnit, device: Device, pager: Pager, instrument: Callable[[], AbstractContextManager[Any]] | None
) -> float:
    """Run a unit on the calling thread, which must be the device's worker.

    Returns:
        Seconds it took, waiting for bytes and for other trials' streams not counted: the time of a trial's next units must not
        depend on where this one happened to run.
    """
    with nullcontext() if instrument is None else instrument():
        start = time.perf_counter()
        waited = unit.run(device, pager)
        device.synchronize()
        return time.perf_counter() - start - waited


def _refuse_lazy(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TaskError(
                f"parameter {name!r} is lazy: its shape is unknown until a forward; run one batch through the module in "
                "model=, or give the sizes"
            )


def _next_of(drawn: Iterator[Any], number: int, epoch: int) -> Any:
    """The next training batch, which has samples, or the end."""
    batch = next(drawn, _END)
    if batch is not _END:
        refuse_empty(batch, "train", number, epoch)
    return batch
