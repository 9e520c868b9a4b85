"""`TrialFigures`: times, progress and memory of a trial under way, as the pool and the scheduler ask for the figures.

`Trial` (`trial.py`) derives from `TrialFigures`, and `Trial` and its subclasses keep the figures up to date. `Worker`
(`pool/runtime/worker.py`) records each unit that has run with `finished`; `train/timing/step_timing.py` and
`fusion/matching/group_timing.py` do so for trials whose steps are timed and discarded. `Worker`, `JobPreparer`
(`pool/runtime/preparer.py`) and `JobDispatcher` (`pool/runtime/dispatcher.py`) tell the scheduler the remaining time.
`pool/devices/host_admission.py` reads the host memory, `pool/views/job_views.py` the time left, and
`pool/runtime/job_state.py` and `pool/fusion/fused_job.py` the figures of results. Only `finished` takes the lock, because
several workers may call `finished` at once. The properties take no lock. The module must not know the pool.
"""

import threading

from hydra_tune.memory.shared.shared_file import SharedFile
from hydra_tune.task import TrainTask
from hydra_tune.train.data.handles import num_batches
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.loop.burst import BURST, BurstRunner
from hydra_tune.train.state.host_quota import fixed_bytes, largest_bytes
from hydra_tune.train.state.model_state import ModelState
from hydra_tune.train.timing.unit_times import TrialProgressCounts, UnitTimes


class TrialFigures:
    """The figures of a trial.

    Attributes:
        unit_times: seconds of the units of one optimizer step, as known now.
    """

    def __init__(self, task: TrainTask) -> None:
        self.task = task
        self.compute_seconds, self.units_run, self.num_shards, self.one_shard_bytes = 0.0, 0, 0, 0
        self.optimizer_placement: str | None = None
        # The reason for the number of pieces, if the number was chosen here.
        self.pieces_why: str | None = None
        self.state: ModelState | None = None
        self.progress = TrialProgressCounts(
            epochs=task.epochs,
            accumulate=task.accumulate,
            report_every=None if task.report_every == "epoch" else task.report_every,
            batches=num_batches(task.train, task.batch_size),
            validation=0 if task.validate is None else num_batches(task.validate, task.batch_size),
        )
        self._lock = threading.Lock()
        self.unit_times, self._evaluation_times = UnitTimes({}), UnitTimes({})
        self._step_left = 0.0
        # Set only while the trial runs its own code.
        self._bursts: BurstRunner | None = None

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

    def units_in(self, unit: PendingUnit) -> int:
        """Return as how many units a unit counts that has run, other than a burst: in a group, those of all members."""
        del unit
        return 1

    @property
    def activations(self) -> tuple[str, ...]:
        """How the activations of each shard but the last are handled until the backward; empty before there is a state."""
        state = self.state
        return () if state is None else tuple(state.activations_of(shard) for shard in state.layout.plan.shards[:-1])

    @property
    def split_batches(self) -> int | None:
        """Pieces of each batch; None until the number has been chosen."""
        return None if self.task.split_batches == "auto" else self.task.split_batches

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step, as known now; at least the turn with a device where the trial runs its own code."""
        bursts = self._bursts
        return self.unit_times.total if bursts is None else max(bursts.turn_seconds, self.unit_times.total)

    @property
    def alike(self) -> str | None:
        """Name under which the trial shares measured step times with other trials; None if the trial measures alone."""
        return self.unit_times.name

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute to come, as known now."""
        steps = self.progress.steps_left * self.unit_times.total
        evaluation = self.progress.evaluated_batches_left * self._evaluation_times.total
        if self._bursts is not None:
            return steps + evaluation
        return self._step_left + max(0.0, steps - self.unit_times.total) + evaluation

    @property
    def units_planned(self) -> int | None:
        """Units of the whole run; None if the length of the data is unknown."""
        steps, evaluated = self.progress.num_steps, self.progress.num_evaluated_batches
        if steps is None or evaluated is None:
            return None
        # Before the first evaluation its units are taken to be as many as the shards.
        per_batch = len(self._evaluation_times) or self.num_shards
        return steps * len(self.unit_times) + evaluated * per_batch

    @property
    def host_bytes(self) -> int:
        """Host memory for the trial's state and the values between its units, in bytes."""
        if self.state is None:
            return 0
        shards = self.state.layout.plan.shards
        return self.state.nbytes + sum(shard.cost.held_bytes for shard in shards)

    @property
    def shared_files(self) -> dict[SharedFile, int]:
        """Files that the trial's parameters share with other trials, and the host memory of each in bytes."""
        return {} if self.state is None else self.state.shared.files

    @property
    def fixed_host_bytes(self) -> int:
        """Host memory that cannot go to disk while the trial lives, in bytes: spilled activations of whole units."""
        return 0 if self.state is None else fixed_bytes(self.state.layout.plan)

    @property
    def largest_host_bytes(self) -> int:
        """Bytes of the largest block of the trial."""
        return 0 if self.state is None else largest_bytes(self.state.layout.plan)
