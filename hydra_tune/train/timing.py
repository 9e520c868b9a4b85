"""How long a trial's units take on this host: a few steps of it, run for real on a device of their own, and thrown away.

What a unit takes is all that its worker has to do for it but wait for copies: its arithmetic, its blocks' bookkeeping, what is
begun to be sent ahead, and the trial's own code that comes before the next unit, which draws and collates batches. How long
copies take is found beside it. So a rehearsal (`pool/rehearsal.py`) can say what a step will take where copies are waited for
at other times, beside other trials say.

Note: a trial of its own. The steps are those of a new trial of the task, from its own streams, on its own copy of the data,
so that whoever asks is left as he was. It reports nothing and evaluates nothing.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.link import Link, link_of
from hydra_tune.memory.meter import CopyTimes
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import Need, Prefetch
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.task import TrainTask
from hydra_tune.train.clock import UnitTimes
from hydra_tune.train.spread import Spread
from hydra_tune.train.step import PendingUnit
from hydra_tune.train.trial import Report, Trial, run_unit
from hydra_tune.train.ways import GROUPED, Offer

_WARM_STEPS = 2  # the first makes optimizer state, the second is the first that loads it
_MOST_STEPS = 9
_LEAST_STEPS = 5
_ENOUGH_SECONDS = 2.0

Place = tuple[str, int, int]
"""Kind and shard of a unit, and how many alike have gone before it in its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What a trial's steps were seen to take.

    Attributes:
        seconds: of each unit of a step, with what its worker does until the next one, copies that are waited for left out.
        link: what copies took.
        times: of the units as the scheduler is told them.
    """

    seconds: Mapping[Place, float]
    link: Link
    times: UnitTimes


class _Alone:
    """Lets batches of a step go through each shard together, and finds nobody who could help."""

    def offer(self) -> Offer | None:
        """No device has nothing to do."""
        return None

    def ask(self, way: str, nbytes: int, most: int) -> int:
        """As many as it likes, on the one device."""
        del nbytes
        return most if way == GROUPED else 1

    def leave(self) -> None:
        """Nothing was lent."""

    def decline(self, way: str) -> None:
        """As it came."""


def timed_steps(task: TrainTask, library: PlanLibrary, like: CpuDevice, *, sends_ahead: bool) -> StepTimes | None:
    """Run a few steps of a task. To be called on a thread that computes as a device's worker does.

    Args:
        task: the trial's.
        library: where its plan is.
        like: a device of the same budget and link; it is left alone.
        sends_ahead: whether what comes next is sent while a unit computes.

    Returns:
        The medians of the steps after the second, or of what there are; None where the data has no whole step.

    Raises:
        HydraTuneError: a unit cannot be run.
    """
    task = replace(task, validate=None, evaluate=None, metric="train_loss")
    device = CpuDevice(0, like.budget_bytes, like.bandwidth)
    trial = Trial(task, library, device, _Alone(), may_run_own_code=False)
    try:
        run = _Run(trial, device, sends_ahead=sends_ahead)
        run.steps()
        return run.found(link_of(device) or Link(bytes_per_second=1.0)) if run.num_steps else None
    finally:
        trial.close(keep=False)
        device.close()


class _Run:
    def __init__(self, trial: Trial, device: CpuDevice, *, sends_ahead: bool) -> None:
        self._trial = trial
        self._device = device
        self._pager = Pager(device)
        self._copies = CopyTimes()
        self._pager.log = self._copies
        self._prefetch = Prefetch(self._pager) if sends_ahead else None
        self._steps: list[dict[Place, float]] = []

    @property
    def num_steps(self) -> int:
        """Steps that have run."""
        return len(self._steps)

    def steps(self) -> None:
        """Run steps until there are enough of them."""
        step: dict[Place, float] = {}
        seen: Counter[tuple[str, int]] = Counter()
        begun = time.perf_counter()
        unit = self._trial.advance()
        while isinstance(unit, PendingUnit):
            done = self._trial.progress.steps
            key = unit.key
            step[*key, seen[key]], unit = self._run(unit)
            seen[key] += 1
            if self._trial.progress.steps > done:
                self._steps.append(step)
                step, seen = {}, Counter()
                has_taken = time.perf_counter() - begun > _ENOUGH_SECONDS
                if self.num_steps >= (_LEAST_STEPS if has_taken else _MOST_STEPS):
                    return

    def _run(self, unit: PendingUnit) -> tuple[float, PendingUnit | Spread | Report | None]:
        """Run one unit; returns its seconds, and what comes after it."""
        pager, waited_ns, start_ns = self._pager, self._pager.waiting_ns, time.perf_counter_ns()
        if self._prefetch is not None:
            self._prefetch.asks = lambda: [Need(one.blocks(), one.workspace_bytes) for one in unit.following()]
        self._trial.finished(unit, run_unit(unit, self._device, pager, None))
        done = self._trial.progress.steps
        following = self._trial.advance()
        while following is not None and not isinstance(following, PendingUnit) and done < self._trial.progress.steps:
            following = self._trial.advance()  # a report, which nobody waits for
        own_ns = time.perf_counter_ns() - start_ns - (pager.waiting_ns - waited_ns)
        return max(0, own_ns) / 1e9, following

    def found(self, guess: Link) -> StepTimes:
        """What was seen."""
        seen = defaultdict(list)
        for step in self._steps[min(_WARM_STEPS, self.num_steps - 1) :]:
            for place, seconds in step.items():
                seen[place].append(seconds)
        usual = {place: statistics.median(found) for place, found in seen.items()}
        return StepTimes(seconds=usual, link=self._copies.link(guess), times=self._trial.unit_times)
