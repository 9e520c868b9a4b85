"""`Ahead`: what each device would do next, so that its bytes can be sent while it computes: double buffering.

Note: double buffering. The scheduler binds a job to a device when the device is free, not before. While a unit runs, a
selection of the same policy, with a memory of its own, is asked what this device would do next, and those bytes are sent.
It knows the very views that the scheduler's policy was told, less the jobs whose shard another device has in its buffer;
for the question, the job that runs here is added as it will be when its unit is over. The answer binds nothing: when the
unit is over, the scheduler chooses among all eligible jobs, and knows whose shard is here. Only where the policy itself
binds early (`EarlyBinding`) is it known what follows.

Note: staggered admission. The jobs of the front go first here as well. Who they are changes only when a job is admitted
or over, or a device comes or goes; then all that crossed the border change their level at once.
"""

from hydra_tune.schedule.levels import Level, Levels
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.schedule.policy import BindsEarly, JobView, Policy, start_selection


class Ahead:
    """Keeps which job each device's buffer is for, and the other eligible jobs in order.

    Not thread-safe, as the scheduler whose views it reads.

    Args:
        policy: whose selections are asked.
        scheduler: has the views.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler) -> None:
        self._is_bound = isinstance(start_selection(policy), BindsEarly)
        self._scheduler = scheduler
        self._front: frozenset[str] = frozenset()
        self._free = Levels(lambda: start_selection(policy))
        self._num_free = 0
        self._seen: dict[str, JobView] = {}  # what the policy was told of each eligible job
        self._claims: dict[str, str] = {}  # jobs that a buffer is for; the selection does not have these
        self._buffers: dict[str, str] = {}

    def set_speed(self, device: str, speed: float) -> None:
        """A device is there, has changed its speed, or is lost (0)."""
        self._free.set_speed(device, speed)

    def notice(self, job: str) -> None:
        """The scheduler may have told the policy something else of this job."""
        view, seen = self._scheduler.view(job), self._seen.get(job)
        if view is seen:
            return
        if job not in self._claims:
            if seen is not None:
                self._take(seen)
            if view is not None:
                self._put(view)
        if view is None:
            del self._seen[job]
        else:
            self._seen[job] = view

    def notice_front(self) -> None:
        """A job was admitted or is over, or a device has come or gone."""
        front = frozenset(self._scheduler.front)
        if front == self._front:
            return
        crossed = sorted(front ^ self._front)
        views = [self._seen[job] for job in crossed if job in self._seen and job not in self._claims]
        for view in views:
            self._take(view)
        self._front = front
        for view in views:
            self._put(view)

    def choose(self, device: str, own: JobView | None) -> str | None:
        """What a device would turn to when its unit is over; its buffer is for that job from now on.

        Args:
            device: it runs a unit.
            own: the job that runs there, as it will be when its unit is over; None where it cannot follow itself.

        Returns:
            The job; None where there is none, and the buffer is for nobody.
        """
        self.unclaim_device(device)
        job = self._choose(device, own)
        if job is not None:
            self._claim(device, job)
        return job

    def claimed_by(self, job: str) -> str | None:
        """The device whose buffer is for a job."""
        return self._claims.get(job)

    def unclaim_device(self, device: str) -> None:
        """A device's buffer is for no job."""
        job = self._buffers.get(device)
        if job is not None:
            self.unclaim(job)

    def unclaim(self, job: str) -> None:
        """No device's buffer is for this job."""
        device = self._claims.pop(job, None)
        if device is None:
            return
        del self._buffers[device]
        if job in self._seen:
            self._put(self._seen[job])

    def _choose(self, device: str, own: JobView | None) -> str | None:
        if self._is_bound:
            return self._scheduler.bound_to(device)
        if own is None:
            return self._free.choose(device).job if self._num_free else None
        level = self._level(own)
        self._free.add(own, level)
        chosen = self._free.choose(device).job
        self._free.remove(own, level)
        return chosen

    def _claim(self, device: str, job: str) -> None:
        """The buffer of a device, which is for no job, is for this one, and no other device's is."""
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
