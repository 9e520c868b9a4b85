"""Times of a trial's units on this host, measured by running a few steps on a separate device and discarding the results.

The time of a unit covers all work of its worker but waits for copies: arithmetic, bookkeeping of blocks, starting
prefetches, and the trial's own code before the next unit (drawing and collating batches). Copies are timed separately.
So a rehearsal (`pool/dry_run/executor.py`) can predict a step whose waits for copies fall elsewhere, for example beside
other trials. `pool/dry_run/report.py` calls `timed_steps` once a task has been planned and checked, if all devices are
CPUs.

Note: a separate trial. The steps belong to a new trial of the task, with separate streams and separate copies of the
loaders, so the caller's objects stay unchanged. The trial evaluates nothing, and its reports are dropped.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.utils.data import Dataset

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.hardware.link import LinkCostModel, link_of
from hydra_tune.memory.link_meter import CopyTimes
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.task import TrainTask
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.parallel.cost_model import GROUPED, DeviceOffer
from hydra_tune.train.parallel.parallel_step import ParallelStep
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.timing.unit_times import UnitTimes
from hydra_tune.train.trial import PendingReport

# The first step creates optimizer state, and the second is the first to load it.
_WARM_STEPS = 2
# The measurement ends after the most steps, or after the least once enough seconds have passed.
_MOST_STEPS = 9
_LEAST_STEPS = 5
_ENOUGH_SECONDS = 2.0

Place = tuple[str, int, int]
"""Kind and shard of a unit, and the number of equal units before the unit in the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Measured times of a trial's steps.

    Attributes:
        seconds: seconds of each unit of a step, up to the worker's next unit and without waits for copies.
        link: measured speed of copies.
        times: times of the units as the scheduler gets them.
    """

    seconds: Mapping[Place, float]
    link: LinkCostModel
    times: UnitTimes


class _SingleDeviceLender:
    """Helpers that let batches of a step go through each shard together, and never offer a second device."""

    def offer(self) -> DeviceOffer | None:
        """Offer no device."""
        return None

    def ask(self, way: str, nbytes: int, most: int) -> int:
        """Grant the wanted number of grouped batches on the single device."""
        del nbytes
        return most if way == GROUPED else 1

    def leave(self) -> None:
        """Do nothing."""

    def decline(self, way: str) -> None:
        """Do nothing."""


def timed_steps(task: TrainTask, library: PlanLibrary, like: CpuDevice, *, sends_ahead: bool) -> StepTimes | None:
    """Run a few steps of a task. Call this on a thread set up like a device's worker.

    Args:
        task: the trial's task.
        library: source of its plan.
        like: a device with the same budget and link; left alone.
        sends_ahead: whether blocks are prefetched.

    Returns:
        The medians over the steps after the second, or over the last of fewer steps; None if the data has no whole
        step.

    Raises:
        HydraTuneError: a unit cannot be run.
    """
    # A batch size may be there for the validation data alone.
    size = task.batch_size if isinstance(task.train, Dataset) else None
    task = replace(task, validate=None, evaluate=None, finish=None, metric="train_loss", batch_size=size)
    device = CpuDevice(0, like.budget_bytes, like.bandwidth)
    trial = SingleTrial(task, library, device, _SingleDeviceLender(), may_run_own_code=False)
    try:
        run = _StepTimingRun(trial, device, sends_ahead=sends_ahead)
        run.steps()
        return run.found(link_of(device) or LinkCostModel(bytes_per_second=1.0)) if run.num_steps else None
    finally:
        trial.close(keep=False)
        device.close()


class _StepTimingRun:
    def __init__(self, trial: SingleTrial, device: CpuDevice, *, sends_ahead: bool) -> None:
        self._trial = trial
        self._device = device
        self._pager = Pager(device)
        self._copies = CopyTimes()
        self._pager.log = self._copies
        self._prefetch = BlockPrefetcher(self._pager) if sends_ahead else None
        self._steps: list[dict[Place, float]] = []

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        return len(self._steps)

    def steps(self) -> None:
        """Run steps until enough are measured."""
        step: dict[Place, float] = {}
        num_runs: Counter[tuple[str, int]] = Counter()
        start = time.perf_counter()
        unit = self._trial.advance()
        while isinstance(unit, PendingUnit):
            steps_before = self._trial.progress.steps
            key = unit.key
            step[*key, num_runs[key]], unit = self._run(unit)
            num_runs[key] += 1
            if self._trial.progress.steps > steps_before:
                self._steps.append(step)
                step, num_runs = {}, Counter()
                has_taken = time.perf_counter() - start > _ENOUGH_SECONDS
                if self.num_steps >= (_LEAST_STEPS if has_taken else _MOST_STEPS):
                    return

    def _run(self, unit: PendingUnit) -> tuple[float, PendingUnit | ParallelStep | PendingReport | None]:
        """Run a unit; return the seconds and the next unit."""
        pager, waited_ns, start_ns = self._pager, self._pager.waiting_ns, time.perf_counter_ns()
        if self._prefetch is not None:
            self._prefetch.asks = lambda: [
                UnitMemoryNeeds(upcoming_unit.blocks(), upcoming_unit.workspace_bytes)
                for upcoming_unit in unit.following()
            ]
        self._trial.finished(unit, run_unit(unit, self._device, pager, None))
        steps_before = self._trial.progress.steps
        next_item = self._trial.advance()
        while (
            next_item is not None
            and not isinstance(next_item, PendingUnit)
            and steps_before < self._trial.progress.steps
        ):
            # A report: nobody answers reports of a measurement.
            next_item = self._trial.advance()
        own_ns = time.perf_counter_ns() - start_ns - (pager.waiting_ns - waited_ns)
        return max(0, own_ns) / 1e9, next_item

    def found(self, guess: LinkCostModel) -> StepTimes:
        """Return the measured times."""
        samples = defaultdict(list)
        for step in self._steps[min(_WARM_STEPS, self.num_steps - 1) :]:
            for place, seconds in step.items():
                samples[place].append(seconds)
        medians = {place: statistics.median(unit_seconds) for place, unit_seconds in samples.items()}
        return StepTimes(seconds=medians, link=self._copies.link(guess), times=self._trial.unit_times)
