"""`Trial`: the course of a trial over time, as a sequence of shard units and reports.

A trial is built from its task, restored from a checkpoint, saved between two steps, and closed at its end. Its training
is a generator that yields wherever a unit is due. The pool runs the unit on a device of its choice and then resumes the
generator. The module must not know the schedule.

`JobPreparer` (`pool/runtime/preparer.py`) makes a trial. `JobState` (`pool/runtime/job_state.py`) advances the trial to its
first unit and, on a worker's thread, after each unit, and closes the trial. `TrialCheckpointer`
(`pool/checkpointing/writer.py`) takes a `snapshot`, and `LoaderWatchdog` (`pool/faults/loader_watchdog.py`) calls
`leave_device` and `end_lease`. `SingleTrial` (`single_trial.py`), `LoopTrial` (`own_loop/loop_trial.py`), `GroupTrial`
(`fusion/group/group_trial.py`) and `PairTrial` (`fusion/runtime/pair_trial.py`) derive from `Trial`, the first two by
`OwnCodeTrial` (`own_code_trial.py`). A group advances its members' trials.

Note: threads. Any thread may call `advance`, `snapshot` and `close`, but never two threads at once. While another thread is
in the trial's program, a thread may read the figures and the clock, and call `set_ending`, `leave_device`, `end_lease`, and
`close` after a loader's timeout.

Note: outside of units, bursts and captures, the code of a `TrainTask` runs inside `_own_code`, so that its draws come from the
trial's streams, and no capture runs meanwhile. `close` gives the claim on the module up once the state is home.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hydra_tune.devices.device import Device
from hydra_tune.errors import BadLossError, MetricError, TaskError
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.memory.trial_context import TrialMemoryContext
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.operators.operator_splitting import SplitOperators, split_operators
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.python_state.state_guard import TaskStateGuard, names_parameters
from hydra_tune.task import TrainTask, weighed
from hydra_tune.train.building import build_model, build_optimizer, on_host, warn_of_unclipped
from hydra_tune.train.checkpoint.compatibility import copied, is_of_the_pass
from hydra_tune.train.checkpoint.python_changes import PythonChanges
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
from hydra_tune.train.data.handles import in_windows
from hydra_tune.train.data.loader_clock import DrawClock
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.burst import BurstMark, no_report_passes, nobody_asks
from hydra_tune.train.loop.direct import WholeModelRunner
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.loop.optimizer_step import OptimizerStep
from hydra_tune.train.loop.plan_cache import TrialPlanCache
from hydra_tune.train.mean import WeightedMean
from hydra_tune.train.own_parametrizations import part_caches
from hydra_tune.train.parallel.parallel_step import ParallelStep
from hydra_tune.train.parallel.pool_offers import DeviceLender
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.state.host_quota import HostMemoryQuota
from hydra_tune.train.state.model_state import ModelState, check_optimizer
from hydra_tune.train.state.shared_state import digests
from hydra_tune.train.timing.shared_times import SharedUnitTimes
from hydra_tune.train.trial_figures import TrialFigures

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReport:
    """A due report; the trial waits for an answer.

    Attributes:
        step: the epoch, from 0, or with `report_every=n` the number of optimizer steps done; of a `LoopTask`, as of
            `LoopReport`.
        metrics: values by reported name: `train_loss` and those of `reported_names` (`task.py`), or as the loop names the
            values.
    """

    step: int
    metrics: dict[str, float]


Said = PendingUnit | ParallelStep | PendingReport | BurstMark
"""Everything that a trial's program yields: units and reports for the pool, marks for the trial."""


class Trial(TrialFigures):
    """A training run under way; each subclass defines the training loop in `_train`, or an `advance` of its own.

    Args:
        device: any device of the pool, for host memory.
        helpers: asked before a step whose batches may run side by side; None: no device could help.
        host: counts host copies and sends some to disk; None: the host has room for all.
        tenant: the trial, for `host`.
        times: measured times of the units of plans, shared by the trials of a pool; None: the trial measures alone.
        beginning: state from which the trial resumes; None: the trial starts from scratch.
        keeper: saves the trial between its steps; None: the trial is never saved.
        may_run_own_code: whether the trial runs the user's own step where the step fits; otherwise the step is
            captured, or runs whole as a single unit.
    """

    _stop_asked = 0  # reports after which `stop=` has been asked

    @property
    def own_thread(self) -> threading.Thread | None:
        """Thread of the trial's own code beside the pool's; None where the code runs on threads of the pool alone."""
        return None

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
        super().__init__(task)
        part_caches()
        self.history: list[dict[str, float]] = []
        self.metrics: dict[str, float] = {}
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._claimed: TrialClaim | None = None
        self._device, self._helpers = device, helpers
        self._host, self._tenant, name = host, tenant, "the trial" if tenant is None else tenant.name
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
        self._operators, self._python_changes = SplitOperators(), PythonChanges(name)
        self._share = HostMemoryQuota(host, tenant)
        self._plans = TrialPlanCache(task, library, self._streams, device, self._share, times or SharedUnitTimes())
        self._interval = WeightedMean()
        self._started = time.perf_counter()
        # Samples of each batch drawn ahead.
        self._ahead: list[int] = []
        # The step whose batches are being drawn.
        self._open_step: OptimizerStep | None = None
        self._may_run_own_code = may_run_own_code
        # Set only while the trial runs its own code.
        self._direct: WholeModelRunner | None = None
        # The state from the trial's own code, until there is a plan.
        self._left: ModelState | None = None
        # Batches of an undone step, to run again as shard units: each with the streams' positions before the batch, if the
        # data have drawn since the last.
        self._undone: list[tuple[Any, Any]] = []
        self.is_asked_to_end: Callable[[], bool] = nobody_asks
        # Asked at a report within a burst: whether the trial may continue without an answer.
        self.passes_report: Callable[[PendingReport], bool] = no_report_passes
        self.outcome = "completed"
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

    @property
    def clock(self) -> DrawClock:
        """Clock of the wait for the trial's loader."""
        return self._feed.clock

    @property
    def any_device(self) -> Device:
        """Any device of the pool, for host memory."""
        return self._device

    def reserve_host(self) -> None:
        """Reserve the host memory that cannot go to disk, until the trial is closed."""
        self._share.take()

    def set_ending(self, *, is_ending: bool) -> None:
        """Note whether the trial may be closed soon: a next trial may then claim the same model, and waits for the end."""
        if self._claimed is not None:
            self._claimed.is_ending = is_ending

    def leave_devices(self) -> bool:
        """Return False: groups have handed over their members' states before; `OwnCodeTrial` has its own method."""
        return False

    def close(self, *, keep: bool) -> None:
        """End the trial: drop the values of the step, and bring the state home as a result (`keep`) or drop the state."""
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
        # The old callbacks know the job, and so would keep its result alive.
        self.is_asked_to_end, self.passes_report = nobody_asks, no_report_passes
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

    def _build(self, building: AbstractContextManager[object] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        task = self.task
        with self._own_code(), building or nullcontext():
            module = on_host(build_model(task))
            self._claimed = TrialClaim(module)
            groups = list(module.parameters()) if task.param_groups is None else task.param_groups(module)
            self._operators, groups = split_operators(module, groups, task.split_operators)
            optimizer = build_optimizer(task, groups)
            warn_of_unclipped(task, module, optimizer)
            self._claimed.take(optimizer)
            self._operators.check(optimizer)
            check_optimizer(optimizer, module)
            self._scheduler = None if task.scheduler is None else task.scheduler(optimizer)
        self.module, self.optimizer = module, optimizer
        if self._keeper is not None or self._beginning is not None:
            self._built = TrialObjects(task=task, module=module, optimizer=optimizer, scheduler=self._scheduler)
        return module, optimizer

    @property
    def _objects(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module and the optimizer of a trial that has built both."""
        assert self.module is not None
        assert self.optimizer is not None
        return self.module, self.optimizer

    def _begin(self) -> DataPosition:
        """Restore the checkpoint, if any; return the place in the data where training begins or resumes."""
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return DataPosition()
        assert self._built is not None
        state = decoded(beginning.saved)
        if beginning.only_weights:
            self._built.restore_weights(state)
            return DataPosition()
        task_changes = self._built.compare(state, allows_changes=beginning.allows_changes)
        with self._own_code():
            self._built.restore(state)
        # The optimizer's state needs groups, and groups need a plan.
        self._saved = {name: state[name] for name in ("optimizer", "trained", "made_for")}
        self._built.thaw(state)
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
        self._stop_asked = state.get("stop_asked", 0)  # older checkpoints lack the number
        self._pass_began = state["pass_began"]
        self._python_changes.resumes(state.get("python", {}))
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
            module, optimizer = self._objects
            named = dict(module.named_parameters())
            optimizer.state.update({named[name]: entries for name, entries in restored_state["optimizer"].items()})
        self._built.restore_frozen(restored_state)

    def _reached(self, place: DataPosition, *, at_report: bool = False) -> None:
        """Tell the keeper that the trial is between two steps and may be saved."""
        if self._keeper is None or (place.batches and not place.is_over and not self._feed.may_skip):
            return
        self._place = place
        try:
            last_epoch = self.task.epochs - 1
            is_end = place.epoch > last_epoch
            is_last = is_end or (place.is_over and place.epoch == last_epoch)
            if is_last and self.task.scheduler_interval == "epoch" and self._scheduler_writes:
                # The last weights are those that the scheduler leaves after the last report.
                is_last, at_report = is_end, at_report or is_end
            self._keeper.reached(self, steps=self.progress.steps, at_report=at_report, is_last=is_last)
        finally:
            self._place = None

    @cached_property
    def _scheduler_writes(self) -> bool:
        """Whether the scheduler may write parameters or the optimizer's state."""
        return self._scheduler is not None and names_parameters(self._scheduler)

    def _python_state(self) -> TaskStateGuard:
        """Return the present values of what the user's functions keep in Python."""
        return TaskStateGuard(self.task, self._objects[0])

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
        python_state = self._python_state()
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
                    "stop_asked": self._stop_asked,
                    "metrics": self.metrics,
                    "units_run": self.units_run,
                    "seconds": time.perf_counter() - self._started,
                    "split_batches": self.split_batches,
                    "python": self._python_changes.changed(python_state),
                },
                digests(self._built.module) if self.state is None else self.state.shared.digests(),
            )
        return TrialStateSnapshot(facts=facts, tensors=tensors, state=self.state, python_state=python_state)

    def _not_adopted(self) -> dict[str, Any]:
        """Return optimizer state that a resumed trial has not adopted yet.

        A trial saved at the end of a pass leaves the pass before there is a plan, and so before `_adopt_saved`.
        """
        return {} if self._saved is None else {name: self._saved[name] for name in ("optimizer", "trained")}

    @property
    def may_be_saved(self) -> bool:
        """Whether the trial waits between two steps."""
        return self._place is not None

    def _draw(self, mode: str, skip: SkippedBatches | None = None) -> Generator[Any, None, None]:
        """Draw the batches of one pass ("train" or "evaluate"), not before the batch, or its step, is needed.

        Returns:
            The batches; where the step or the default evaluation gets a sum of weights, pairs from `weighed`.
        """
        task, is_training = self.task, mode == "train"
        handle = task.train if is_training else task.validate
        assert handle is not None, "there is nothing to evaluate on"
        drawn = self._feed.draw(handle, shuffle=is_training, skip=skip)
        if is_training:
            return self._in_windows(drawn, task.accumulate) if task.draws_whole_steps else drawn
        return drawn if task.loss_weight is None or task.evaluate is not None else self._in_windows(drawn, 1)

    def _in_windows(self, drawn: Generator[Any, None, None], length: int) -> Generator[Any, None, None]:
        """Draw all batches of a step before the first of them is trained on; weigh the batches, or set their divisor."""
        with closing(drawn):
            for window in in_windows(drawn, length):
                if self.task.loss_weight is None:
                    self._gradients.divisor = len(window)
                else:
                    with self._own_code():
                        window = weighed(self.task, window)  # noqa: PLW2901 - the batches in pairs
                yield from window

    def _draw_pass(self, skipped: int) -> Generator[Any, None, None]:
        """Draw the batches of a training pass, without the batches trained on before the checkpoint."""
        if not skipped:
            self._python_changes.compare(self._python_state)
            self._pass_began = {} if self._keeper is None else self._data_state()
            return self._draw("train")
        current_state, pass_start = self._data_state(), self._pass_began

        def go_on() -> None:
            # The repeated draws have moved the streams away from their positions in the checkpoint.
            self._restore_data(current_state)
            self._python_changes.compare(self._python_state)

        self._streams.restore(pass_start["streams"])
        # Copied, because drawing changes the values in place, and the next checkpoint of the pass saves them again.
        self._feed.restore(copied(pass_start["feed"]))
        return self._draw("train", SkippedBatches(skipped, go_on))

    def _data_state(self) -> dict[str, Any]:
        """Return the positions of all streams and samplers on which the next batches depend."""
        return {"streams": self._streams.state(), "feed": copied(self._feed.states())}

    def _restore_data(self, data_state: dict[str, Any]) -> None:
        """Put all streams and samplers back to the positions from `_data_state`."""
        self._streams.restore(data_state["streams"])
        self._feed.restore(data_state["feed"])

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

    def _train(self) -> Generator[Said, None, None]:
        """Yield the units and reports of the whole run; subclasses whose `advance` runs the program define the method."""
        raise NotImplementedError

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
        """Return the context of the wait for a loader's workers, for which nobody else may have to wait."""
        # Also without the device, which an earlier draw of the same step may have cost.
        return GATE.left() if self._bursts is None else self._bursts.waiting()

    def _reading(self) -> AbstractContextManager[object]:
        """Return the context of code that may read the trial's tensors between units."""
        return nullcontext() if self.state is None else self.state.readers.reading()
