"""Owners of the bytes in the memory tiers, so that a disk error ends only the trial with the affected bytes.

`JobState` (`pool/runtime/job_state.py`) makes a context for each job. The pool's threads (`pool/runtime/worker.py`,
`pool/runtime/preparer.py`, `pool/runtime/dispatcher.py`) and a loop's own thread (`train/own_loop/loop_trial.py`) enter
`at_work` while they serve a trial, and `TensorGroups` (`train/state/tensor_groups.py`) notes the context in each block.
`HostTier` (`memory/host/host_tier.py`) fails the trial's context when the disk refuses the trial's bytes, and `Pool`
(`pool/pool.py`) stops the context of a cancelled or pruned job. The tier and `Pager` (`pager.py`) check the context before
they wait for room, and `HostMemoryQuota` (`train/state/host_quota.py`) reserves host memory for the context. The module must
not know the pool.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hydra_tune.errors import HydraTuneError


class TrialMemoryContext:
    """A trial as seen by the memory tiers.

    Args:
        on_failure: called once, on any thread, when bytes of the trial could not be kept; must not wait for blocks.

    Attributes:
        failure: the error; from then on the trial's host copies may be thrown away.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], name: str = "the trial") -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._is_stopped = False
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Note that bytes of the trial could not be kept; only the first error counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._on_failure(error)

    def stop(self) -> None:
        """Note that the trial has been cancelled or pruned, so that no thread waits for room on its behalf."""
        self._is_stopped = True

    def check(self) -> None:
        """Raise if the trial is over; call before waiting or reading on the trial's behalf.

        Raises:
            HydraTuneError: bytes of the trial could not be kept, by the error of `fail`; or the trial has been stopped.
        """
        if self.failure is not None:
            raise self.failure
        if self._is_stopped:
            raise HydraTuneError("the trial has been stopped")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which this thread works for the trial."""
        token = _AT_WORK.set(self)
        try:
            yield
        finally:
            _AT_WORK.reset(token)


_AT_WORK: ContextVar[TrialMemoryContext | None] = ContextVar("tenant at work", default=None)


def tenant_at_work() -> TrialMemoryContext | None:
    """Return the trial served by this thread, or None if unknown."""
    return _AT_WORK.get()


def check_tenant() -> None:
    """Call `TrialMemoryContext.check` for the trial served by this thread, if any."""
    tenant = tenant_at_work()
    if tenant is not None:
        tenant.check()
