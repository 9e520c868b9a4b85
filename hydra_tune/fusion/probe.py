"""What a step takes alone and stacked: a few steps of each, run for real on copies, and thrown away.

Note: nobody's state. What runs are trials of their own, with copies of a model and of one batch, and with streams of their own,
so that whoever asks is left as he was, and the pool's ledgers, times and figures know nothing of it. Their memory is beside the
ledgers, for as long as it takes.

Note: the clock. On a CPU device it is the CPU time of the calling thread, which does not run on while others have the core; on
a GPU it is the time until the device is done.
"""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from hydra_tune.devices.device import Device
from hydra_tune.errors import HydraTuneError
from hydra_tune.fusion.group import GroupTrial
from hydra_tune.fusion.member import Member
from hydra_tune.fusion.plans import GroupPlans
from hydra_tune.fusion.seat import ClosedDesk, Seat
from hydra_tune.memory.pager import Pager
from hydra_tune.shard import batch as batches
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.task import TrainTask
from hydra_tune.train.feed import Feed
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.streams import RandomStreams
from hydra_tune.train.trial import Trial, run_unit

_WARM_STEPS = 1  # makes optimizer state
_LEAST_STEPS, _MOST_STEPS = 2, 5  # that are timed
_ENOUGH_SECONDS = 0.02
_DRAWS = 4


class Bench:
    """Times steps of one task on one device; from one thread, which computes as a device's worker does.

    Args:
        task: the trial's.
        module: what its `model=` has built; only read.
        batch: its first one; only read.
        library: where its plan is.
        device: where to; its worker may be at work there.
    """

    def __init__(self, task: TrainTask, module: nn.Module, batch: Any, library: PlanLibrary, device: Device) -> None:
        self._original = task
        own = batches.copied(batch)
        self._task = replace(
            task,
            model=lambda: copy.deepcopy(module),
            train=lambda: itertools.repeat(own),
            batch_size=None,
            validate=None,
            evaluate=None,
            metric="train_loss",
            report_every="epoch",
            epochs=1,
        )
        self._library = library
        self._device = device

    def now(self) -> float:
        """Seconds by the clock that counts here."""
        return time.thread_time() if self._device.torch_device.type == "cpu" else time.perf_counter()

    def alone(self) -> float:
        """Seconds of a step of one trial.

        Raises:
            HydraTuneError: it cannot be run.
        """
        trial = Member(self._task, self._library, self._device)
        return self._steps(trial, lambda: trial.progress.steps)

    def together(self, count: int, plans: GroupPlans) -> float:
        """Seconds of a step of so many trials.

        Args:
            count: trials.
            plans: makes the group's plans.

        Returns:
            Of all of them together.

        Raises:
            HydraTuneError: they cannot be stacked, or run.
        """
        seats = [Seat(Member(self._task, self._library, self._device), waits=False) for _ in range(count)]
        trial = GroupTrial(seats, plans, self._library, self._device, ClosedDesk())
        return self._steps(trial, lambda: seats[0].member.progress.steps)

    def drawing(self) -> float:
        """Seconds in which one trial draws the batches of a step from its own data; 0 where processes of a loader do so."""
        handle = self._original.train
        if isinstance(handle, DataLoader) and handle.num_workers > 0:
            return 0.0
        streams = RandomStreams(self._original.seed)
        feed = Feed(self._original.batch_size, streams.everything, streams.moves)
        feed.check(handle)
        seen, before = [], self.now()
        with closing(feed.draw(handle, shuffle=True)) as drawn:
            for _ in itertools.islice(drawn, _DRAWS):
                after = self.now()
                seen.append(after - before)
                before = after
        feed.close()
        return self._original.accumulate * min(seen, default=0.0)

    def _steps(self, trial: Trial, steps_done: Callable[[], int]) -> float:
        """The least of the steps after the first ones, since whatever comes between only adds to it."""
        with self._device.worker(), _closing(trial):
            found: list[float] = []
            for seconds in self._timed(trial, steps_done):
                found.append(seconds)
                timed = found[_WARM_STEPS:]
                if len(timed) == _MOST_STEPS or (len(timed) >= _LEAST_STEPS and sum(timed) > _ENOUGH_SECONDS):
                    return min(timed)
        raise HydraTuneError("its first steps do not run to their ends")

    def _timed(self, trial: Trial, steps_done: Callable[[], int]) -> Iterator[float]:
        pager = Pager(self._device)
        done, began = 0, self.now()
        while isinstance(unit := trial.advance(), PendingUnit):
            if steps_done() > done:
                before, done, ended = done, steps_done(), self.now()
                yield (ended - began) / (done - before)  # a unit may have several
                began = ended
            trial.finished(unit, run_unit(unit, self._device, pager, None))


@contextmanager
def _closing(trial: Trial) -> Iterator[None]:
    """Closed at the end, with all that it has."""
    try:
        yield
    finally:
        trial.close(keep=False)
