"""Updates of a trial that are made on the host, beside what devices do meanwhile.

Note: what makes it exact. The optimizer is one object, and its step takes whatever parameter has a gradient. So a trial's
updates run one after the other, in the order in which they were asked for, on whichever device's host thread; and units that
run meanwhile give their gradients to stand-ins for the parameters (`ModelState.stand_ins`), where the optimizer does not see
them. The parameters of an update are pinned at home from before it is asked for until it is over, so that a unit that needs
one of them waits for it. Nothing of the trial's own code runs before all updates of a step are over (`wait`).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from hydra_tune.devices.device import Device
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.memory.block import Block
from hydra_tune.memory.home import AtHome
from hydra_tune.memory.pressure import NotRepeatableError
from hydra_tune.shard.gate import GATE


class HostUpdates:
    """Those of one trial; asked for and waited for by one thread at a time."""

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def start(
        self, device: Device, blocks: Sequence[Block], step: Callable[[], None], over: Callable[[int, int], None]
    ) -> None:
        """Have an update made when those before it are over.

        Args:
            device: beside which.
            blocks: of the parameters; they stay at home until then.
            step: makes it.
            over: told when it began and when it was over, by the clock of `time.perf_counter_ns`; called whether it was made
                or not, and where it was not, with the same time twice.
        """
        home = AtHome(blocks)
        try:
            self._last = device.start_on_host(partial(_make, self._last, step, home, over))
        except BaseException:
            home.leave()
            raise

    def wait(self) -> None:
        """Until all are over.

        Raises:
            OutOfMemoryError: one of them could not be made for want of host memory.
            Exception: whatever the optimizer has raised.
        """
        last, self._last = self._last, None
        if last is None:
            return
        try:
            last.result()
        except NotRepeatableError as error:
            raise OutOfMemoryError(
                f"the host ran out of memory in an update of the optimizer, and it cannot be repeated, because {error.reason} "
                f"({error.__cause__}); end other programs, lower host_memory or max_concurrent, or use "
                "optimizer_placement='device'"
            ) from error

    def wait_quietly(self) -> None:
        """Until all are over, however they end."""
        last, self._last = self._last, None
        if last is not None:
            last.exception()


def _make(
    before: Future[None] | None, step: Callable[[], None], home: AtHome, over: Callable[[int, int], None]
) -> None:
    began_ns = ended_ns = time.perf_counter_ns()
    try:
        if before is not None:
            before.result()  # after an update that has failed none is made
        with GATE.shared():
            began_ns = time.perf_counter_ns()
            step()
            ended_ns = time.perf_counter_ns()
    finally:
        home.leave()
        over(began_ns, max(began_ns, ended_ns))
