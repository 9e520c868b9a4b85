"""One thread that sends the heartbeats of all running trials of a search, for storages with a heartbeat.

The module knows nothing of pools or of training. `OptimizeDriver` (`driver.py`) calls `add` when a trial begins or waits to
be taken up, `beat` once the driver has found the trials that dead processes have left, and `discard` when a trial has been
told. The driver fails stale trials only while `tells_who_lives` is true.

Note: the driver's thread makes all calls, `beat` also while the sender sends. The sender touches the storage alone, in a
session of its own, and never the study or the sampler. The lock guards the numbers of the trials, and no call to the
storage happens under the lock.
"""

import time
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

from optuna.logging import get_logger
from optuna.storages import BaseStorage

from hydra_tune_optuna.optuna_internals import heartbeat_of

_logger = get_logger("optuna.hydra_tune")

_PATIENCE_SECONDS = 5.0  # with a heartbeat that the storage has not answered when the search ends
_SET_SECONDS = 1.0
"""A jump of the clock by this much means that the clock was set, not merely adjusted."""


class StudyHeartbeatSender:
    """Sends heartbeats for the trials between `add` and `discard`; does nothing for a storage without heartbeat.

    The thread starts with the first trial, sends a heartbeat at once for each new trial, and ends with the `with`
    block.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._target = heartbeat_of(storage)
        self._trial_ids: set[int] = set()
        self._lock = Lock()
        self._wake = Event()
        self._stopped = False
        self._thread: Thread | None = None
        self._offset_seconds = _offset_seconds()
        self._set_seconds = float("-inf")

    @property
    def tells_who_lives(self) -> bool:
        """Whether trials without a recent heartbeat may be taken for dead.

        Heartbeats are compared by the time of day. After the clock was set forward, or the machine has slept, all
        heartbeats seem old until every process has sent another; the storage cannot detect such a jump.
        """
        if self._target is None:
            return False
        interval_seconds = self._target.get_heartbeat_interval() or 0
        offset_seconds, now = _offset_seconds(), time.monotonic()
        if offset_seconds - self._offset_seconds > _SET_SECONDS:
            self._set_seconds = now
            _logger.warning(
                "The clock went forward by %.0f seconds; for the next %d seconds no trial is taken for stale.",
                offset_seconds - self._offset_seconds,
                2 * interval_seconds,
            )
        # Each jump is counted once; a clock set back makes heartbeats seem younger, which takes no trial for dead.
        self._offset_seconds = offset_seconds
        return now - self._set_seconds > 2 * interval_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Before the wake-up, after which the thread looks at the flag.
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            # Limited: the thread may hang in a storage that answers no more, and the driver holds Ctrl-C back meanwhile.
            self._thread.join(_PATIENCE_SECONDS)
            if self._thread.is_alive():
                _logger.warning(
                    "The storage has not answered a heartbeat for %g seconds; the search ends without the answer.",
                    _PATIENCE_SECONDS,
                )

    def add(self, trial_id: int) -> None:
        """Send heartbeats for this trial from now on."""
        if self._target is None:
            return
        with self._lock:
            self._trial_ids.add(trial_id)
        if self._thread is None:
            # A daemon, should the interpreter end before the `with` block.
            self._thread = Thread(target=self._run, name="hydra-tune-heartbeat", daemon=True)
            self._thread.start()
        # Wake the thread, or the new trial would have no heartbeat for up to a whole interval.
        self._wake.set()

    def beat(self) -> None:
        """Send a heartbeat for every trial before returning, and so before the driver first fails stale trials."""
        target = self._target
        if target is None:
            return
        # Copy under the lock, send without: a slow storage must not block `add` and `discard`.
        with self._lock:
            trial_ids = sorted(self._trial_ids)
        for trial_id in trial_ids:
            try:
                target.record_heartbeat(trial_id)
            except Exception:
                _logger.warning("The heartbeat of the trial with id %d was not recorded.", trial_id, exc_info=True)

    def discard(self, trial_id: int) -> None:
        """Stop the heartbeats of this trial."""
        with self._lock:
            self._trial_ids.discard(trial_id)

    def _run(self) -> None:
        assert self._target is not None
        interval_seconds = self._target.get_heartbeat_interval()
        while not self._stopped:
            self.beat()
            self._wake.wait(interval_seconds)
            # Cleared before the next round: a trial added during the round wakes the thread again.
            self._wake.clear()
        # The thread has its own storage session.
        self._storage.remove_session()


def _offset_seconds() -> float:
    """Time of day minus monotonic time: constant, except when the clock is set."""
    return time.time() - time.monotonic()
