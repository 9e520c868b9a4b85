"""The preparer: a thread that builds, captures and cuts the models of admitted jobs, in sequence.

If a job's loader delivers no first batch in time, the thread stays with the job, and a new thread takes the
following jobs (`pool/faults/loader_watchdog.py`). `Pool` (`pool/pool.py`) makes the `JobPreparer` and starts its thread;
`JobDispatcher` (`dispatcher.py`) queues a job for the thread when the scheduler admits the job. For a carrier of fused
jobs, `make_trial` is `GroupJobLauncher.make` (`pool/fusion/group_jobs.py`).

Note: order. The thread waits for host memory with the job at hand, so host memory is granted in the order of admission,
apart from jobs whose loader is slow. Each job taken from the queue ends in exactly one `JobAdmitted` or `JobRejected`,
or is abandoned, by the loader watch or by a breakdown of the pool.

Note: locks. The thread builds models, and so runs users' code, without the pool's lock; `has_room` and the admission run
under the lock.
"""

import threading
from collections.abc import Callable

import torch

from hydra_tune.devices.device import Device
from hydra_tune.memory.host.host_tier import HostTier
from hydra_tune.pool.devices.host_admission import has_room
from hydra_tune.pool.devices.idle_devices import JobDeviceLender, PoolDeviceLender
from hydra_tune.pool.devices.next_units import unit_of
from hydra_tune.pool.runtime.dispatcher import JobDispatcher
from hydra_tune.pool.runtime.job_state import JobState, forget_locals
from hydra_tune.schedule import JobAdmitted, JobRejected
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.timing.shared_times import SharedUnitTimes


class JobPreparer:
    """Makes jobs ready to run.

    Args:
        device: returns any working device of the pool, for allocating host memory.
        lender: offers devices to trials whose steps can be split.
        host: host tier that sends state beyond `host_bytes` to disk; None: the host has to hold all state.
        host_bytes: host memory in bytes for the state of all admitted jobs.
    """

    def __init__(
        self,
        core: JobDispatcher,
        library: PlanLibrary,
        device: Callable[[], Device],
        lender: PoolDeviceLender,
        host: HostTier | None,
        host_bytes: int,
    ) -> None:
        self._core = core
        self._library = library
        self._device = device
        self._lender = lender
        self._host = host
        self._host_bytes = host_bytes
        self._times = SharedUnitTimes()
        self._replaced: set[int] = set()

    def work(self) -> None:
        """Run the thread's main loop."""
        torch.set_num_threads(1)
        # Plans try code outside of a trial's streams, and put the thread's streams back: never those of the user's threads.
        with self._core.breaking(), RandomStreams(0).everything():
            while (record := self._core.to_prepare.get()) is not None:
                with record.tenant.at_work():
                    self._prepare(record)
                forget_locals(record.error)  # the ended frame refers to the trial, too
                # This thread has been replaced while it waited for a loader; the replacement serves the queue.
                if threading.get_ident() in self._replaced:
                    self._replaced.discard(threading.get_ident())  # the system gives a later thread the same number
                    return
                del record  # else the last job's model would live until the next job arrives

    def replace(self, thread: int) -> bool:
        """Let a thread that waits for a loader end after its job; return whether the thread was not replaced before.

        Under the pool's lock.
        """
        is_new = thread not in self._replaced
        self._replaced.add(thread)
        return is_new

    def _prepare(self, record: JobState) -> None:
        """Build, capture and cut a job's model, and wait until the host has room for the job's state."""
        core, job = self._core, record.job
        try:
            # Stopped between `Admit` and now: no unit of the job ever runs.
            if record.outcome is not None:
                core.tell(JobRejected(job=job.key))
                return
            record.lost_before = frozenset(core.given_up)
            helpers = JobDeviceLender(self._lender, record)
            keeper = record.keeper
            if keeper is not None:
                keeper.open()
            beginning = record.begin()
            if keeper is not None and beginning is not None:
                keeper.goes_on_from(beginning.saved.path)
            with core.preparing(job):
                trial = record.make_trial(
                    job.task,
                    self._library,
                    self._device(),
                    helpers,
                    self._host,
                    record.tenant,
                    self._times,
                    beginning=beginning,
                    keeper=keeper,
                )
                del beginning  # else a whole checkpoint would stay in memory
                trial.is_asked_to_end, trial.passes_report = record.is_asked_to_end, record.passes
                record.trial = trial
                unit = record.advance(report_is_free=True)
            if trial.state is not None:
                key = job.key  # bound now: a job that begins again gets another key
                trial.state.watch(lambda shard, device: core.moved(key, shard, device))
                if core.log is not None:
                    core.log.owns(job.key, trial.state.number)
            # Only now is the size of the trial's state known, from its plan.
            self._await_host_memory(record)
        except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
            # An abandoned job has already been rejected and ended by the loader watch.
            if not record.is_abandoned:
                core.fail(record, error, JobRejected(job=job.key))
            return
        assert isinstance(unit, PendingUnit | None), "a first step has one unit at a time"
        if unit is None:
            core.stop_completed(record)
            core.tell(JobRejected(job=job.key))
            return
        with core.changed:
            job.enter("running")
            core.decide(
                JobAdmitted(
                    job=job.key,
                    unit=unit_of(unit),
                    remaining_seconds=trial.remaining_seconds,
                    step_seconds=trial.step_seconds,
                    alike=trial.alike,
                )
            )
        core.release_all()

    def _await_host_memory(self, record: JobState) -> None:
        core = self._core
        # The jobs behind this one wait, too, so host memory is granted in the order of admission.
        with core.changed:
            core.changed.wait_for(
                lambda: (
                    # After a breakdown, the abandoned jobs keep their reservations until the shutdown, which waits for us.
                    core.error is not None
                    or record.outcome is not None
                    or has_room(record, core.records.values(), self._host_bytes, self._host)
                )
            )
        assert record.trial is not None
        record.trial.reserve_host()
