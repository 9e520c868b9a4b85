"""`PlainLoop`: a loop of the user's own outside of a pool, with which a pool's numbers are compared.

`train_plain` (`train/loop/reference_loop.py`) makes and runs a `PlainLoop` for a `LoopTask`, with the seed set.

Note: bits. A `PlainLoop` only moves the module, counts, and delivers reports: everything else is the loop's own.

Note: gate. The loop runs while `run` shares `GATE` (`shard/capture/capture_lock.py`), because a capture in a pool of the
same process changes the rounding of all threads. Reports are delivered outside the gate.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer

from hydra_tune.errors import LoopEnded, TaskError
from hydra_tune.loop_task import LoopTask
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.train.building import own_build
from hydra_tune.train.own_loop.handle import Loop, LoopReport
from hydra_tune.train.own_loop.registered import Registered


class PlainLoop:
    """Calls a loop, and does at its marks what needs no pool.

    Attributes:
        device, num_steps, is_saved: as of `LoopHost`.
        module, optimizer: what the loop has registered, as of `Registered`.
        history: the reports so far, as in a result.
    """

    is_saved = False

    def __init__(self, report: Callable[[int, dict[str, float]], bool | None] | None, device: torch.device) -> None:
        self.device, self.num_steps = device, 0
        self.module: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.history: list[dict[str, float]] = []
        self._report, self._started = report, time.perf_counter()
        self._thread = threading.get_ident()
        self._building = ExitStack()  # the context of the code before `register`
        self._is_pruned = False

    def run(self, task: LoopTask) -> str:
        """Call the loop; return "completed" or "pruned".

        Raises:
            LoopEnded: the loop itself has raised the error, without a report that was answered with False.
            Exception: any error of the loop.
        """
        task.warn_of_changes()
        loop = Loop(task, self)
        try:
            with GATE.shared(), self._building:
                self._building.enter_context(own_build())
                reports = loop.finish(task.fn(loop))
            self._deliver(reports)
        except LoopEnded:
            if not self._is_pruned:
                raise
        return "pruned" if self._is_pruned else "completed"

    def warn_of_left_out(self, names: list[str]) -> None:
        """As of `LoopHost`: nothing is saved."""

    def check_caller(self) -> None:
        """As of `LoopHost`."""
        if threading.get_ident() != self._thread:
            raise TaskError("a loop belongs to the thread of its function, and another thread has called it")

    def take(self, registered: Registered, steps: int | None) -> None:
        """As of `LoopHost`."""
        del steps
        self._building.close()
        self.module, self.optimizer = registered.module, registered.optimizer
        self.module.to(self.device)

    def end_unit(self, reports: list[LoopReport], *, may_resume: bool) -> None:
        """As of `LoopHost`."""
        del may_resume
        self.num_steps += 1
        # A capture, which changes the rounding of all threads, waits for the end of the unit, as in a pool.
        with GATE.left():
            self._deliver(reports)

    def _deliver(self, reports: list[LoopReport]) -> None:
        for report in reports:
            seconds = time.perf_counter() - self._started
            self.history.append({"step": report.step, "epoch": 0, "seconds": seconds, **report.metrics})
            self._is_pruned |= self._report is not None and self._report(report.step, dict(report.metrics)) is False
            if self._is_pruned:
                raise LoopEnded("the report was answered with False")
