"""`EarlyBinding`: choose for the buffer, while the unit before still runs. What the default does not do, to compare with."""

from hydra_tune.schedule.policy import JobView, Selection, SpeedAware


class EarlyBinding:
    """Any selection, asked one unit ahead: the job that follows on a device is chosen when a unit starts there.

    The choice is among the jobs that are eligible then, less those bound to other devices, so the job that starts is
    never the one that follows. A bound job waits for its device, whatever else becomes free; only where nothing else is
    left does another device take it, the one submitted earliest first, because no device stands idle while a job waits.

    Args:
        selection: what chooses.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._num_free = 0
        self._bound: dict[str, JobView] = {}  # eligible and bound; the selection does not have these
        self._device_of: dict[str, str] = {}  # job, eligible or not just now, to the device it is bound to
        self._job_of: dict[str, str] = {}

    def add(self, view: JobView) -> None:
        """Keep a bound job aside, and any other in the selection."""
        if view.job in self._device_of:
            self._bound[view.job] = view
        else:
            self._selection.add(view)
            self._num_free += 1

    def remove(self, view: JobView) -> None:
        """Take the job out. It stays bound: it may only have changed its shard's place."""
        if self._bound.pop(view.job, None) is None:
            self._selection.remove(view)
            self._num_free -= 1

    def choose(self, device: str) -> JobView:
        """Take the job bound to the device, or choose now where none is; then bind the next."""
        view = self._bound.get(self._job_of.get(device, ""))
        self._unbind(device)
        if view is None:
            view = self._choose_now(device)
        if self._num_free > 1:
            self._selection.remove(view)  # the one that starts now is not idle
            self._bind(device)
            self._selection.add(view)
        return view

    def bound_to(self, device: str) -> str | None:
        """The job that follows on the device, if it is eligible."""
        job = self._job_of.get(device)
        return job if job in self._bound else None

    def set_speed(self, device: str, speed: float) -> None:
        """Tell the selection; a device that is lost lets go of its job."""
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
            del self._device_of[job]
            view = self._bound.pop(job, None)
            if view is not None:
                self.add(view)
