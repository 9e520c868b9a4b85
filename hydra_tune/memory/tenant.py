"""Whose bytes the tiers of memory hold, so that an error of the disk ends the trial whose bytes it is about, and no other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hydra_tune.errors import HydraTuneError


class Tenant:
    """One trial, as the tiers of memory know it.

    Args:
        on_failure: told once, on any thread, that bytes of the trial could not be kept; it must not wait for blocks.

    Attributes:
        failure: why; what is on the host of its bytes may be thrown away from then on.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._is_stopped = False
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Bytes of the trial could not be kept."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._on_failure(error)

    def stop(self) -> None:
        """The trial has been cancelled or pruned: nothing of it need wait for room any more."""
        self._is_stopped = True

    def check(self) -> None:
        """Called by what works for the trial, before it waits or reads.

        Raises:
            HydraTuneError: its bytes could not be kept, or it has been stopped.
        """
        if self.failure is not None:
            raise self.failure
        if self._is_stopped:
            raise HydraTuneError("the trial has been stopped")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """What this thread does meanwhile, it does for the trial."""
        token = _AT_WORK.set(self)
        try:
            yield
        finally:
            _AT_WORK.reset(token)


_AT_WORK: ContextVar[Tenant | None] = ContextVar("tenant at work", default=None)


def tenant_at_work() -> Tenant | None:
    """Whom this thread works for; None where nobody has said."""
    return _AT_WORK.get()


def check_tenant() -> None:
    """`Tenant.check` of whom this thread works for."""
    tenant = tenant_at_work()
    if tenant is not None:
        tenant.check()
