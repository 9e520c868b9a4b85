"""`FusionBenchmark`: time a step alone and stacked, by a few real steps on copies that are then discarded.

`GroupSizeChooser` (`group_size_chooser.py`) times steps before a group is formed, `pool/dry_run/fusion_report.py` for
`HydraExecutor.plan(probe=True)`, and `pool/fusion/group_jobs.py` when planned steps prove slower than predicted.

Note: isolation. The timed trials are separate, with copies of a model and of a batch and with separate random streams.
The trial that gave the model and the batch stays unchanged, and the pool's ledgers, times and figures do not see the
timed steps. While steps are timed, the memory of the steps comes on top of the ledgers. `drawing` alone reads the data of
the trial itself, through a separate feed. Whatever the user's functions and data count in Python meanwhile is put back,
but for values that other trials may have changed as well, which a warning names.

Note: clock. On a CPU device the clock is the CPU time of the calling thread, which excludes time taken by other
threads. On a GPU the clock runs until the device is done.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from hydra_tune.devices.device import Device
from hydra_tune.errors import HydraTuneError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.slot import ClosedGroupDelegate, GroupSlot
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.step_capture import copied_model
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.shard.python_state.state_guard import PythonStateUndo
from hydra_tune.task import TrainTask
from hydra_tune.train.data.data_feed import TrialDataFeed
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.trial import Trial

_WARM_UNITS = 1
_BURST_SECONDS = 0.01  # of own code; a trial's own bursts are longer, and three of them would cost too much
_LEAST_STEPS, _MOST_STEPS = 2, 5  # timed steps
_ENOUGH_SECONDS = 0.02
_DRAWS = 4


class FusionBenchmark:
    """Times steps of a task on a device. Call from a single thread, which computes as a device's worker does.

    Args:
        module: the model built by the task's `model=`; only read.
        batch: the trial's first batch; only read.
        device: the device; its worker may be busy at the same time.
    """

    def __init__(self, task: TrainTask, module: nn.Module, batch: Any, library: PlanLibrary, device: Device) -> None:
        self._original = task
        # With `loss_weight`, a trial draws pairs of a batch and the sum of the weights.
        batch_copy = batches.copied(batch if task.loss_weight is None else batch[0])
        self._task = replace(
            task,
            model=lambda: copied_model(module),
            # An endless loader of a single batch: no epoch ends during the probe, and drawing costs nothing.
            train=lambda: itertools.repeat(batch_copy),
            batch_size=None,
            validate=None,
            evaluate=None,
            finish=None,
            metric="train_loss",
            report_every="epoch",
            epochs=1,
        )
        self._library = library
        self._device = device

    def now(self) -> float:
        """Return the time in seconds, by the clock for the device."""
        return time.thread_time() if self._device.torch_device.type == "cpu" else time.perf_counter()

    def alone(self) -> float:
        """Return the seconds of a step of a single trial.

        Raises:
            HydraTuneError: the trial cannot run.
        """
        with self._undone():
            trial = MemberTrial(self._task, self._library, self._device)
            return self._steps(trial, lambda: trial.progress.steps)

    def together(self, count: int, plans: GroupPlanFactory) -> float:
        """Return the seconds of a step of `count` trials together.

        Raises:
            HydraTuneError: the trials cannot be stacked, or cannot run.
        """
        with self._undone():
            # Reports need no answer, so that the probe never waits.
            seats = [GroupSlot(MemberTrial(self._task, self._library, self._device), waits=False) for _ in range(count)]
            trial = GroupTrial(seats, plans, self._library, self._device, ClosedGroupDelegate())
            return self._steps(trial, lambda: seats[0].member.progress.steps)

    def drawing(self) -> float:
        """Return the seconds in which a trial draws the batches of a step; 0 if worker processes draw, or no batch comes."""
        handle = self._original.train
        if isinstance(handle, DataLoader) and handle.num_workers > 0:
            return 0.0
        streams = RandomStreams(self._original.seed)
        feed = TrialDataFeed(self._original.batch_size, streams.everything, streams.moves)
        with self._undone(), closing(feed):
            feed.check(handle)
            draw_seconds, began = [], self.now()
            with closing(feed.draw(handle, shuffle=True)) as draws:
                for _ in itertools.islice(draws, _DRAWS):
                    ended = self.now()
                    draw_seconds.append(ended - began)
                    began = ended
        # The fastest draw, since interference only adds time.
        return self._original.accumulate * min(draw_seconds, default=0.0)

    def _undone(self) -> AbstractContextManager[None]:
        """Context of the user's code, whose changes of Python state are undone at the end."""
        return PythonStateUndo.of_tasks(self._original).undone()

    def _steps(self, trial: Trial, steps_done: Callable[[], int]) -> float:
        """Return the seconds of the fastest unit's step after the warm-up, since interference only ever adds time."""
        with self._device.worker(), _closing(trial):
            step_seconds, num_timed, spent_seconds = list[float](), 0, 0.0
            # The first unit creates optimizer state, so its time does not count.
            for seconds, num_steps in itertools.islice(self._timed(trial, steps_done), _WARM_UNITS, None):
                step_seconds.append(seconds)
                num_timed, spent_seconds = num_timed + num_steps, spent_seconds + seconds * num_steps
                if num_timed >= _MOST_STEPS or (num_timed >= _LEAST_STEPS and spent_seconds > _ENOUGH_SECONDS):
                    return min(step_seconds)
        raise HydraTuneError("it ended before enough steps were timed")

    def _timed(self, trial: Trial, steps_done: Callable[[], int]) -> Iterator[tuple[float, int]]:
        """Run the trial's units; after each unit that ends steps, yield the seconds of a step and their number."""
        pager = Pager(self._device)
        num_steps, began = 0, self.now()
        while isinstance(unit := trial.advance(), PendingUnit):
            if steps_done() > num_steps:
                steps_before, num_steps, ended = num_steps, steps_done(), self.now()
                yield (ended - began) / (num_steps - steps_before), num_steps - steps_before
                began = ended
            trial.is_asked_to_end = partial(_is_past, time.perf_counter() + _BURST_SECONDS)
            trial.finished(unit, run_unit(unit, self._device, pager, None))


def _is_past(end: float) -> bool:
    return time.perf_counter() >= end


@contextmanager
def _closing(trial: Trial) -> Iterator[None]:
    try:
        yield
    finally:
        trial.close(keep=False)
