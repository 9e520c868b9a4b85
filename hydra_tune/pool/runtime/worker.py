"""The worker of a device: runs units from the device's inbox and hands the next due units to the scheduler.

The update of the same shard that follows a backward runs along with the backward, without a decision of the scheduler.
During a unit's compute the worker may prefetch blocks of the predicted next unit (`memory/prefetch.py`).

`Pool` (`pool/pool.py`) makes one `Worker` for each device, when the pool starts or when the device is added, and starts
the worker's thread. The module must not choose units or know how a unit computes: the scheduler chooses, and the unit
runs itself under the worker's pager. Nor may the module know how groups form.

Note: locks. A unit holds the turn on the device (`DeviceUseLock`), so that no borrower uses the device meanwhile; a burst
holds the job's turn as well. The worker runs units without the pool's lock.

Note: threads. While a trial waits for its loader, `LoaderWatchdog` (`pool/faults/loader_watchdog.py`) has the pool start
a second thread of the same `Worker`. The first thread brings the trial's next unit back (`JobDispatcher.came_back`) and
ends. Only the present thread declares the loss of the device. A further thread (`_releases`) hands the results of
completed jobs over, beside the next units.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from hydra_tune.devices.device import Device
from hydra_tune.devices.single_thread import SingleThreadExecutor
from hydra_tune.memory.block import BlockKind
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from hydra_tune.observe.trace.turns import current_turn
from hydra_tune.pool.devices.device_failure import DeviceLossHandler
from hydra_tune.pool.devices.device_reservation import DeviceUseLock
from hydra_tune.pool.devices.library_memory import LedgerFitter
from hydra_tune.pool.devices.oom_retry import OutOfMemoryHandler
from hydra_tune.pool.faults.retry import found_lost
from hydra_tune.pool.runtime.dispatcher import PROBE, DeviceLossProbe, JobDispatcher
from hydra_tune.pool.runtime.job_state import JobState, NextAction, forget_locals
from hydra_tune.pool.runtime.recorder import PoolRecorder
from hydra_tune.pool.stats import DeviceStats
from hydra_tune.schedule import Unit, UnitFailed, UnitFinished
from hydra_tune.supervision.marks import at_work, here
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.loop.burst import BURST
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.trial import PendingReport, Trial

Instrument = Callable[[], AbstractContextManager[Any]]

_GRAPH_KINDS = ("forward", "backward", "evaluate")  # kinds that load all blocks before computing
# A short hand-over ends before the next unit begins, so the ends of trials keep their order among the other events.
_PATIENCE_SECONDS = 0.02
RESUME = Unit(kind="resume", shard=0, seconds=0.0)  # runs a trial's own code after a report, no shard unit


class Worker:
    """Runs units on a device.

    Args:
        instrument: returns a context manager, entered around every unit.
        recorder: records units; None: nothing is recorded.
        losses: handles the loss of the device.
        turn: grants the device to units, in turn with borrowers of the device.

    Attributes:
        busy_seconds: time spent in units, with copies and waits.
        units: as of `DeviceStats`.
    """

    def __init__(
        self,
        core: JobDispatcher,
        device: Device,
        pager: Pager,
        instrument: Instrument | None,
        recorder: PoolRecorder | None,
        losses: DeviceLossHandler,
        turn: DeviceUseLock,
    ) -> None:
        self.busy_seconds = 0.0
        self.units = 0
        self._core = core
        self._device = device
        self._pager = pager
        self._instrument = instrument
        self._recorder = recorder
        self._losses = losses
        self._device_turn = turn
        self._is_lost = False
        self._taken: PendingUnit | None = None  # the running unit, where its kind shows whether compute has begun
        self._pressure = OutOfMemoryHandler(device, pager)
        self._libraries = LedgerFitter(device, pager)
        self._prefetch = None if core.next_units is None else BlockPrefetcher(pager)
        self._releases: SingleThreadExecutor  # of the present thread of `work`

    def work(self) -> None:
        """Run the thread's main loop."""
        if self._core.log is not None:
            self._core.log.at_work(self._device.name)
        # The streams are put back as in `JobPreparer.work`.
        with self._core.breaking(), RandomStreams(0).everything():
            try:
                # Outermost, so that this thread ends, and can be joined, only after the last release.
                with self._release_thread() as self._releases, self._device.worker():
                    self._work()
            except RuntimeError as error:  # `Device.worker` synchronizes at its end, which a lost device refuses
                if not self._is_lost:
                    if not self._losses.is_here(self._device.name, error):
                        raise
                    # A thread that waited for a loader: only the device's present worker declares the loss.
                    self._core.inboxes[self._device.name].put(PROBE)

    def _work(self) -> None:
        inbox = self._core.inboxes[self._device.name]
        while (item := inbox.get()) is not None:
            if isinstance(item, DeviceLossProbe):
                is_over = self._look()
            else:
                with self._turn(item[0]), contextlib.ExitStack() as until_told:
                    is_over = self._run(*item, until_told)
                forget_locals(item[0].error)  # the ended frame refers to the trial, too
            del item  # else the last job's model would live until the next item arrives
            if is_over:
                return
        # At shutdown, by contrast, all jobs are over, and their blocks with them.
        if self._device.name in self._core.gone:
            self._leave()

    def _leave(self) -> None:
        """Write back and free the blocks of a leaving device, or declare the loss of the device."""
        name = self._device.name
        try:
            self._pager.empty()
            self._device.reclaim()
        except RuntimeError as error:
            if not self._losses.is_here(name, error):
                raise
            self._is_lost = True
            self._losses.report(name, error)

    def _look(self) -> bool:
        """Return whether the idle device is lost, and declare the loss."""
        error = found_lost(self._device)
        if error is None:
            return False
        self._is_lost = True
        self._losses.report(self._device.name, error)
        return True

    def stats(self) -> DeviceStats:
        """Statistics since the pool began."""
        pager = self._pager
        return DeviceStats(
            budget_bytes=pager.ledger.most_bytes,
            peak_bytes=pager.ledger.peak_bytes,
            resident_bytes=pager.resident_bytes,
            busy_seconds=self.busy_seconds,
            bytes_in_by_kind=_by_name(pager.bytes_in),
            bytes_out_by_kind=_by_name(pager.bytes_out),
            bytes_across_by_kind=_by_name(pager.bytes_across),
            units=self.units,
            bytes_ahead=pager.bytes_ahead,
            bytes_in_vain=pager.bytes_in_vain,
            waiting_seconds=pager.waiting_ns / 1e9,
            copying_seconds=pager.copying_ns / 1e9,
            host_update_seconds=pager.host_ns / 1e9,
            units_repeated=self._pressure.units_repeated,
            loads_under_way=pager.loads_under_way,
        )

    @contextlib.contextmanager
    def _turn(self, record: JobState) -> Iterator[None]:
        recorder = self._recorder
        recording = contextlib.nullcontext() if recorder is None else recorder.turn(record.job.key, self._device.name)
        with recording, record.tenant.at_work(), at_work(record.job.name):
            yield

    def _run(self, record: JobState, unit: Unit, until_told: contextlib.ExitStack) -> bool:
        """Run a unit and advance the job; return whether this thread of the worker has to end."""
        assert record.trial is not None
        trial = record.trial
        record.lost_before = frozenset(self._core.given_up)
        seconds = 0.0
        following: NextAction | None = None
        try:
            if unit.kind != RESUME.kind:
                seconds = self._run_pending(record, trial, unit)
            if record.is_spread:
                # Released by the caller once the scheduler knows that the device is idle (`JobState.telling`).
                until_told.enter_context(record.telling)
            following = self._go_on(record, unit)
            while _is_update(following.step, unit.shard) and not record.is_detached:
                # A backward's update needs no decision of its own: parameters and gradients are still resident, and
                # another unit in between might have them spilled.
                seconds += self._run_pending(record, trial, unit)
                following = self._go_on(record, unit)
        except BaseException as error:  # noqa: BLE001 - whatever a trial's code raises ends that trial alone
            following = None  # the traceback keeps this frame, and a unit keeps the trial
            if record.is_detached:
                self._core.came_back(record, error)
                return True
            return self._failed(record, unit, error)
        if record.is_detached:
            self._core.came_back(record, following)
            return True
        # Before `_finish_unit`: a job stopped while its last unit still counts as running ends together with the unit.
        if following.is_end and record.outcome is None:
            trial.set_ending(is_ending=True)  # before a next trial is admitted, whose model may be the same one
            self._core.stop_completed(record)
        self._finish_unit(record, seconds, following)
        return False

    def _failed(self, record: JobState, unit: Unit, error: BaseException) -> bool:
        """Handle the error of a unit: the job fails, or the unit is due again; return whether the device is lost."""
        core, name, unbegun_unit = self._core, self._device.name, self._taken
        self._taken = None
        if self._pager.ready_ns:  # all blocks were resident, and compute has begun: the unit cannot be put back
            unbegun_unit = None
        if self._losses.is_here(name, error):
            self._is_lost = True
            if unbegun_unit is not None:
                record.put_back(unit, unbegun_unit)
            self._losses.report(name, error, record, is_intact=unbegun_unit is not None)
            return True
        # Blocks of the unit were on the lost device, so the unit never began here, and is due again at once, on any device.
        if self._losses.is_elsewhere(name, error) and unbegun_unit is not None:
            with core.changed:
                is_due = record.outcome is None
                if is_due:
                    record.put_back(unit, unbegun_unit)
                    core.decide(UnitFinished(record.job.key, name, 0.0, unit, record.remaining_seconds))
            core.release_all()
            # A job stopped meanwhile has no further unit: `UnitFailed` below ends the unit for the scheduler.
            if is_due:
                return False
        core.fail(record, error, UnitFailed(job=record.job.key, device=name))
        return False

    def _go_on(self, record: JobState, unit: Unit) -> NextAction:
        if record.outcome is not None:
            return NextAction()
        following = record.go_on(unit, self._device.name, report_is_free=record.job.reports_freely)
        if here() is not None:
            # The trial's own code between units may have left work on a GPU. A fault there must appear under this trial's
            # mark, and not in another trial's unit.
            self._device.synchronize()
        return following

    def _run_pending(self, record: JobState, trial: Trial, unit: Unit) -> float:
        pending = record.take(unit)
        # Other kinds compute before all their blocks are resident, so nobody could tell that such a unit has not begun.
        self._taken = pending if pending.kind in _GRAPH_KINDS else None
        if self._prefetch is not None:
            self._prefetch.asks = partial(self._next_needs, record, pending)
        # A burst advances the trial from within the unit, so the turn is held: no other thread may advance or save the
        # trial meanwhile.
        turn = record.turn if pending.kind == BURST else contextlib.nullcontext()
        with self._device_turn.unit(), turn:
            seconds = self._pressure.run(record.job.name, pending, partial(self._timed_unit, record, pending))
        self._taken = None
        trial.finished(pending, seconds)
        return seconds

    def _next_needs(self, record: JobState, pending: PendingUnit) -> list[UnitMemoryNeeds]:
        """Return the needs of the predicted unit after the unit that starts to compute now."""
        assert self._core.next_units is not None
        return self._core.next_units.needs(record, pending, self._device.name)

    def _timed_unit(self, record: JobState, pending: PendingUnit) -> float:
        start_ns, turn, watch = time.perf_counter_ns(), current_turn(), self._device.stopwatch()
        self._pager.ready_ns, is_failed, steps_before = 0, True, record.steps_run
        try:
            unit_record = contextlib.nullcontext() if turn is None else turn.unit(pending.kind, pending.shard)
            with unit_record, self._libraries.measured((record.job.key, *pending.key)):
                seconds = run_unit(pending, self._device, self._pager, self._instrument, watch)
            is_failed = False
        finally:
            if self._prefetch is not None:
                self._prefetch.end()
            end_ns = time.perf_counter_ns()
            if not is_failed:  # the host may notice the end late, and the clocks of host and device drift
                end_ns = min(end_ns, max(start_ns, self._pager.ready_ns, watch.ended_ns))
            if record.is_detached:  # the device has served other units since then
                end_ns = record.detached_ns
            steps = 1 if is_failed else record.units_in(pending)
            if pending.kind == BURST:
                steps = record.steps_run - steps_before
            self.units += steps
            self.busy_seconds += (end_ns - start_ns) / 1e9
            if self._core.log is not None:
                # A failed unit whose blocks never became resident waited all the time. A unit without blocks here never
                # waited.
                ready_ns = min(self._pager.ready_ns or (end_ns if is_failed else start_ns), end_ns)
                name, job = self._device.name, record.job.key
                self._core.log.unit(
                    *(name, job, pending.kind, pending.shard, start_ns, ready_ns, end_ns),
                    is_failed=is_failed,
                    steps=steps,
                )
        return seconds

    def _finish_unit(self, record: JobState, seconds: float, following: NextAction) -> None:
        core, job, trial = self._core, record.job, record.trial
        assert trial is not None
        if core.hint is not None and not core.hint.is_over:
            core.hint.look(trial)
        report = following.step if isinstance(following.step, PendingReport) else None
        units = following.units
        # In one hold of the lock: the driver may answer a report at once, and `Pool.proceed` ignores a job that does not
        # wait yet.
        with core.changed:
            if report is not None and record.outcome is None:
                job.enter("waiting")
            finished = UnitFinished(
                job=job.key,
                device=self._device.name,
                seconds=seconds,
                unit=units[0] if units else None,
                remaining_seconds=trial.remaining_seconds,
                step_seconds=trial.step_seconds,
                others=units[1:],
                alike=trial.alike,
            )
            if report is not None:
                core.tell_of(record, report)
            core.decide(finished)
        core.release_all(self._release)

    def _release_thread(self) -> SingleThreadExecutor:
        threads = self._core.releasing
        name = f"hydra-release-{self._device.name}"
        return SingleThreadExecutor(name, lambda: threads.add(threading.current_thread()))

    def _release(self, record: JobState) -> None:
        """Give back an ended job's memory; a long hand-over of a result goes on beside the next units."""
        # In a recording all releases are between turns, else a replay could not tell what a turn found on the device.
        if record.outcome == "completed" and self._recorder is None and _leave_devices(record):
            wait([self._releases.submit(partial(self._release_beside, record))], _PATIENCE_SECONDS)
        else:
            self._core.release(record)

    def _release_beside(self, record: JobState) -> None:
        with self._core.breaking(), at_work(record.job.name):
            self._core.release(record)


def _leave_devices(record: JobState) -> bool:
    """Bring a trial's state home, and return whether the state is home.

    The worker moves the state itself: the next unit finds the room, and no device can be lost with bytes of a completed trial.
    """
    try:
        return record.trial is not None and record.trial.leave_devices()
    except Exception:  # noqa: BLE001 - the release tries again, and reports the error
        return False


def _by_name(counts: Counter[BlockKind]) -> dict[str, int]:
    # Copied first, in a single step, because other threads may add a kind meanwhile.
    return {kind.value: count for kind, count in dict(counts).items()}


def _is_update(step: PendingUnit | PendingReport | None, shard: int) -> bool:
    return isinstance(step, PendingUnit) and (step.kind, step.shard) == ("update", shard)
