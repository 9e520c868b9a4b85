"""`NextJobPredictor`: prediction of each device's next job, so that the pool prefetches the job's bytes during compute.

`NextUnitPredictor` (`pool/devices/next_units.py`) asks when a unit begins to compute; `SimulatedPrefetcher`
(`simulate/engine/lookahead.py`) is a subclass. Before a question, both pass on the changes of jobs, of the front and of
the devices. The module must not import torch, read a clock or start a thread.

Note: double buffering. While a unit runs, `NextJobPredictor` asks separate selections of the same policy for the device's
likely next job, and the driver prefetches the job's bytes. The separate selections hold the views last noticed, without the
jobs claimed by other devices' buffers. For the question, the running job is added as of the end of its unit, if the job
can follow itself. The prediction is not binding: at the end of the unit, the scheduler chooses among all eligible jobs, and
knows which shards are resident on the device. Under a policy with early binding (`EarlyBinding`), the predictor instead
returns the job that the scheduler's selection has bound to the device.

Note: staggered admission. Jobs of the front go first in predictions, too, and so do jobs that are not staggered.
"""

from hydra_tune.schedule.levels import Level, PriorityLevels
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.schedule.policies.policy import BindsEarly, JobView, Policy, start_selection


class NextJobPredictor:
    """Tracks which job each device's buffer is for, and keeps the other eligible jobs in order.

    Not thread-safe, like the scheduler, whose views `NextJobPredictor` reads: a pool calls both under its lock, a simulation
    from its only thread.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler) -> None:
        self._is_bound = isinstance(start_selection(policy), BindsEarly)
        self._scheduler = scheduler
        self._front: frozenset[str] = frozenset()
        self._free = PriorityLevels(lambda: start_selection(policy))
        self._num_free = 0
        self._seen: dict[str, JobView] = {}  # the view of each eligible job, as last given to a selection
        self._claims: dict[str, str] = {}  # job to the device whose buffer is for the job; not in the selection
        self._buffers: dict[str, str] = {}

    def set_speed(self, device: str, speed: float) -> None:
        """Add a device, change its speed, or remove the device (speed 0)."""
        self._free.set_speed(device, speed)

    def notice(self, job: str) -> None:
        """Take over a job's present view from the scheduler."""
        view, known_view = self._scheduler.view(job), self._seen.get(job)
        # Identity is enough: the scheduler keeps the old object where the new view is equal (`SchedulerState.put`).
        if view is known_view:
            return
        # A claimed job is in no selection, so only its stored view changes.
        if job not in self._claims:
            if known_view is not None:
                self._take(known_view)
            if view is not None:
                self._put(view)
        if view is None:
            del self._seen[job]
        else:
            self._seen[job] = view

    def notice_front(self) -> None:
        """Take over the scheduler's present front, after each change of the front and before the next question."""
        front = frozenset(self._scheduler.front)
        if front == self._front:
            return
        crossed = sorted(front ^ self._front)
        # All views leave before `_front` changes, because `_level` reads `_front` and a view has to leave the level
        # that it entered.
        views = [self._seen[job] for job in crossed if job in self._seen and job not in self._claims]
        for view in views:
            self._take(view)
        self._front = front
        for view in views:
            self._put(view)

    def choose(self, device: str, own: JobView | None) -> str | None:
        """Choose the likely next job of a device, and claim the device's buffer for the job.

        Args:
            device: a device that runs a unit.
            own: the running job as of the end of its unit; None where the job cannot follow itself.

        Returns:
            The job; None without a candidate, which leaves the buffer unclaimed.
        """
        self.unclaim_device(device)
        job = self._choose(device, own)
        if job is not None:
            self._claim(device, job)
        return job

    def claimed_by(self, job: str) -> str | None:
        """Return the device whose buffer is for a job."""
        return self._claims.get(job)

    def unclaim_device(self, device: str) -> None:
        """Release a device's buffer from its job."""
        job = self._buffers.get(device)
        if job is not None:
            self.unclaim(job)

    def unclaim(self, job: str) -> None:
        """Release the buffer that is for a job, if any."""
        device = self._claims.pop(job, None)
        if device is None:
            return
        del self._buffers[device]
        # A claimed job that began to run, or is over, is no longer eligible and must not return to the selection.
        if job in self._seen:
            self._put(self._seen[job])

    def _choose(self, device: str, own: JobView | None) -> str | None:
        if self._is_bound:
            return self._scheduler.bound_to(device)
        # The selection cannot be asked while empty.
        if own is None:
            return self._free.choose(device).job if self._num_free else None
        level = self._level(own)
        # Only for the question: the running job is not eligible, and leaves the selection right away.
        self._free.add(own, level)
        chosen = self._free.choose(device).job
        self._free.remove(own, level)
        return chosen

    def _claim(self, device: str, job: str) -> None:
        """Claim an unclaimed device's buffer for a job, and release any other buffer for the same job."""
        other = self._claims.get(job)
        if other is not None:
            del self._buffers[other]
        elif job in self._seen:
            self._take(self._seen[job])
        self._claims[job], self._buffers[device] = device, job

    def _put(self, view: JobView) -> None:
        self._free.add(view, self._level(view))
        self._num_free += 1

    def _take(self, view: JobView) -> None:
        self._free.remove(view, self._level(view))
        self._num_free -= 1

    def _level(self, view: JobView) -> Level:
        return view.priority, view.job in self._front
