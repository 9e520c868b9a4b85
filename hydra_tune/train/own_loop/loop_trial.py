"""`LoopTrial`: a `LoopTask` as a trial of a pool.

The trial's program resumes the loop's thread from mark to mark, and says what each mark means to the pool. So the loop
runs in bursts, like the own code of a `TrainTask` that fits its device (`train/loop/burst.py`), and is never cut: its
registered state is the trial's state, which other trials spill between its bursts.

`Pool` (`pool/pool.py`) chooses a `LoopTrial` for each job whose task is a `LoopTask`, and `JobPreparer`
(`pool/runtime/preparer.py`) makes the trial. Code before `register` runs in the pool's preparation, as the factories of
other tasks do.

Note: threads. Until `close`, either the loop's thread or the pool's thread that runs the program runs, so no attribute needs a
lock. Each thread enters streams, gate and device for itself, because the contexts belong to the thread.
"""

import logging
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_tune.errors import BudgetError
from hydra_tune.loop_task import LoopTask
from hydra_tune.quantities import format_bytes, format_bytes_up
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.execute.eager_plan import state_plan
from hydra_tune.supervision.marks import at_work
from hydra_tune.train.building import on_host, own_build
from hydra_tune.train.checkpoint.trial_checkpoint import DataPosition, TrialObjects
from hydra_tune.train.claims import TrialClaim
from hydra_tune.train.loop import burst
from hydra_tune.train.loop.burst import BurstMark
from hydra_tune.train.own_code_trial import OwnCodeTrial
from hydra_tune.train.own_loop.handle import Loop, LoopReport
from hydra_tune.train.own_loop.loop_thread import LoopThread
from hydra_tune.train.own_loop.registered import JointOptimizer, Registered
from hydra_tune.train.own_loop.unit_memory import LoopUnitMemory
from hydra_tune.train.state.model_state import optimizer_tensors
from hydra_tune.train.trial import PendingReport, Said

_LOGGER = logging.getLogger(__name__)
_LOOKS = 10  # of the pool's thread in a burst
_BUILD_SECONDS = 60.0  # for which other builds wait for a loop that has not yet registered its model


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitEnd:
    """A mark of the loop: the end of a unit, or, with `is_last`, of the loop; `may_resume` as of `Loop.step`."""

    reports: list[LoopReport]
    may_resume: bool
    is_last: bool = False


class LoopTrial(OwnCodeTrial):
    """A trial that runs a loop of the user's own; arguments as of `Trial`."""

    task: LoopTask

    def __init__(self, task: LoopTask, *args: Any, **options: Any) -> None:
        super().__init__(task, *args, **options)
        self._name = "the trial" if self._tenant is None else self._tenant.name
        self._memory = LoopUnitMemory(self._registered_tensors, sees_operators=task.precision == "float32")
        self._loop = Loop(task, self)
        self._thread = LoopThread(f"hydra-loop {self._name}", self._call, self._inside)
        self._building = ExitStack()  # the context of the code before `register`
        # By the clock of `time.perf_counter`: the beginning of the present step, and of the code since the last hand-over.
        self._began = self._resumed = 0.0
        # A report since the last save, or a save that was due where the loop could not resume.
        self._owes_save = False

    # The loop's side: on the loop's thread, apart from `own_thread` and `check_caller`.

    @property
    def device(self) -> torch.device:
        """As of `LoopHost`."""
        return (self._memory.device or self._device).torch_device

    @property
    def num_steps(self) -> int:
        """As of `LoopHost`."""
        return self.progress.steps

    @property
    def is_saved(self) -> bool:
        """As of `LoopHost`."""
        return self._keeper is not None and self._keeper.path is not None

    def warn_of_left_out(self, names: list[str]) -> None:
        """As of `LoopHost`."""
        _LOGGER.warning(
            "%s does not register %s, whose state changes are not saved: where it resumes, the function makes new ones; add "
            "them to loop.register() if the rest of the loop depends on them",
            self._name,
            ", ".join(map(repr, names)),
        )

    @property
    def own_thread(self) -> threading.Thread | None:
        """As of `Trial`."""
        return self._thread.thread

    def check_caller(self) -> None:
        """As of `LoopHost`."""
        self._thread.check_caller()

    def take(self, registered: Registered, steps: int | None) -> None:
        """As of `LoopHost`."""
        self._building.close()
        module = self.module = on_host(registered.module)
        optimizer = self.optimizer = registered.optimizer
        self._scheduler = registered.rest
        self._claimed = TrialClaim(module)
        self._claimed.take(optimizer)
        if self._keeper is not None or self._beginning is not None:
            parts = optimizer.optimizers if isinstance(optimizer, JointOptimizer) else ()
            self._built = TrialObjects(
                task=self.task, module=module, optimizer=optimizer, scheduler=registered.rest, parts=parts
            )
        is_over = self._begin().is_over and (steps is None or steps <= self.progress.steps)
        self.progress.batches_per_epoch = steps
        if self.history:
            self._loop.continues(int(self.history[-1]["step"]))
        self._python_changes.compare(self._python_state)
        if self._keeper is not None:
            python_state = self._python_state()
            self._python_changes.begins(python_state)
            self._keeper.begins(python_state)
        budget = self._plans.library.budget
        plan = state_plan(self.task, module, optimizer, budget)
        if plan.peak_bytes > budget.budget_bytes:
            raise BudgetError(
                f"the state that the loop registers needs {format_bytes(plan.peak_bytes)} on a device, with gradients and the "
                f"optimizer's state, and the smallest device has a budget of {format_bytes(budget.budget_bytes)}; raise "
                f"device_memory to more than {format_bytes_up(plan.peak_bytes)}, or let the pool cut the model: describe the "
                "training with a TrainTask",
                enough_bytes=plan.peak_bytes,
            )
        self._make_bursts(module, optimizer, plan, self._memory)
        self._thread.mark(BurstMark.BEGINS)
        if is_over:
            # The function would train on, or repeat its last report.
            self._thread.mark(_UnitEnd(reports=[], may_resume=True, is_last=True))

    def end_unit(self, reports: list[LoopReport], *, may_resume: bool) -> None:
        """As of `LoopHost`."""
        self.progress.steps += 1
        self._took(self.unit_times, self._began)
        every = None if self._keeper is None else self._keeper.every_steps
        if not may_resume and every is not None and self.progress.steps % every == 0:
            self._owes_save = True
        if reports or self._memory.has_followed or GATE.is_wanted or self._is_turn_over():
            self._thread.mark(_UnitEnd(reports=reports, may_resume=may_resume))
        elif may_resume:
            self._save()
            self._place = None
        self._began = time.perf_counter()

    def _is_turn_over(self) -> bool:
        """Whether the pool's thread has to look again; each look takes as long as a small step."""
        return time.perf_counter() - self._resumed >= burst.BURST_SECONDS / _LOOKS

    def _call(self) -> None:
        self.task.warn_of_changes()
        with self._building:
            self._building.enter_context(own_build(_BUILD_SECONDS))
            reports = self._loop.finish(self.task.fn(self._loop))
        self._thread.mark(_UnitEnd(reports=reports, may_resume=True, is_last=True))

    def _inside(self) -> ExitStack:
        """Enter the context of the loop's code between two marks; the pool's thread has contexts of its own."""
        self._began = self._resumed = time.perf_counter()
        stack = ExitStack()
        stack.enter_context(at_work(self._name))
        stack.enter_context(nullcontext() if self._tenant is None else self._tenant.at_work())
        stack.enter_context(self._streams.everything())
        device = self._memory.device if self._memory.is_held else None
        if device is None:
            torch.set_num_threads(1)
        else:
            stack.enter_context(device.worker())
        stack.enter_context(GATE.shared())
        if device is not None:
            stack.enter_context(self._memory.unit())
        return stack

    def _registered_tensors(self) -> Iterator[Tensor]:
        module, optimizer = self._objects
        yield from dict(named_state(module)).values()
        if self._memory.device is not None:
            yield from optimizer_tensors(optimizer, self._memory.device)

    # The pool's side: on the thread that runs the program.

    def _train(self) -> Generator[Said, None, None]:
        try:
            while True:
                mark = self._thread.resume()
                if not isinstance(mark, _UnitEnd):
                    yield mark
                    continue
                if self._memory.has_followed:
                    # What the unit has made becomes state of the trial.
                    yield BurstMark.FOLLOWED
                yield from self._deliver(mark)
                if mark.is_last:
                    break
                yield BurstMark.STEP
            if not self.units_run:
                _LOGGER.warning(
                    "%s has never called loop.step(), so it kept its device from its beginning to its end; call loop.step() "
                    "after each step",
                    self._name,
                )
        finally:
            self._thread.end()

    def _save(self, *, is_last: bool = False) -> None:
        """Save the trial if due; on either side, while the other waits."""
        if self._keeper is not None:
            self._place, is_due, self._owes_save = DataPosition(is_over=is_last), self._owes_save, False
            self._keeper.reached(self, steps=self.progress.steps, at_report=is_due, is_last=is_last)

    def _deliver(self, mark: _UnitEnd) -> Generator[Said, None, None]:
        """Save the trial if due, and deliver reports."""
        for report in mark.reports:
            seconds = time.perf_counter() - self._started
            self.metrics = report.metrics
            self.history.append({"step": report.step, "epoch": 0, "seconds": seconds, **report.metrics})
        self._owes_save = self._owes_save or bool(mark.reports)
        if mark.may_resume:
            self._save(is_last=mark.is_last)
        for report in mark.reports:
            # The trial may be saved while its report waits for an answer.
            self._place = DataPosition(is_over=mark.is_last) if mark.may_resume else None
            yield PendingReport(step=report.step, metrics=dict(report.metrics))
        self._place = None
