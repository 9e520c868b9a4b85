"""`EarlyBinding`: binds a device's next job while the previous unit still runs, for comparison with late binding.

`LRTFPaper` (`lrtf_paper.py`) wraps each selection in an `EarlyBinding` when made with `idle_only=True`. `PriorityLevels`
(`schedule/levels.py`) adds, removes and asks, and `NextJobPredictor` (`schedule/ahead.py`) reads `bound_to` through
`Scheduler` instead of asking a selection of its own.
"""

from hydra_tune.schedule.policies.policy import JobView, Selection, SpeedAware


class EarlyBinding:
    """Wraps a selection, and asks the selection one unit ahead: a device's next job is chosen right after its present job.

    The choice is among the jobs eligible at that moment, without the present job and the jobs bound to other devices. A bound
    job waits for its device, even if another device becomes free. Only when no unbound job is left may another device take a
    bound job, the earliest submitted first, because no device idles while a job waits.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._num_free = 0
        self._bound: dict[str, JobView] = {}  # eligible jobs that are bound, and so not in the selection
        self._device_of: dict[str, str] = {}  # from each bound job, eligible now or not, to the job's device
        self._job_of: dict[str, str] = {}

    def add(self, view: JobView) -> None:
        """Set a bound job aside, and add any other job to the selection."""
        if view.job in self._device_of:
            self._bound[view.job] = view
        else:
            self._selection.add(view)
            self._num_free += 1

    def remove(self, view: JobView) -> None:
        """Remove a job, which stays bound: perhaps only the place of its shard has changed."""
        if self._bound.pop(view.job, None) is None:
            self._selection.remove(view)
            self._num_free -= 1

    def choose(self, device: str) -> JobView:
        """Take the job bound to the device, or choose a job now; then bind the next job."""
        view = self._bound.get(self._job_of.get(device, ""))
        self._unbind(device)
        if view is None:
            view = self._choose_now(device)
        # The starting job is still in the selection, so binding needs a second job.
        if self._num_free > 1:
            self._selection.remove(view)  # the starting job is not idle, so it cannot be bound
            self._bind(device)
            self._selection.add(view)
        return view

    def bound_to(self, device: str) -> str | None:
        """Return the job bound to the device, if the job is eligible."""
        job = self._job_of.get(device)
        return job if job in self._bound else None

    def set_speed(self, device: str, speed: float) -> None:
        """Pass the speed on to the selection; a lost device releases its job."""
        if isinstance(self._selection, SpeedAware):
            self._selection.set_speed(device, speed)
        if not speed:
            self._unbind(device)

    def _choose_now(self, device: str) -> JobView:
        if self._num_free:
            return self._selection.choose(device)
        view = min(self._bound.values(), key=lambda view: view.order)
        self._unbind(self._device_of[view.job])
        return view

    def _bind(self, device: str) -> None:
        view = self._selection.choose(device)
        self._selection.remove(view)
        self._num_free -= 1
        self._bound[view.job] = view
        self._device_of[view.job], self._job_of[device] = device, view.job

    def _unbind(self, device: str) -> None:
        job = self._job_of.pop(device, None)
        if job is not None:
            # Before `add`, which would otherwise set the job aside again as bound.
            del self._device_of[job]
            view = self._bound.pop(job, None)
            if view is not None:
                self.add(view)
