"""Updates of a trial on the host, made while devices run other units.

`ModelState` (`model_state.py`) queues an update whenever an update unit runs with the optimizer on the host, and
`OptimizerStep` (`train/loop/optimizer_step.py`) waits for the queue at the end of each step, and `Trial` (`train/trial.py`)
before a snapshot. `TensorGroups`
(`tensor_groups.py`) has the queue, and waits before the state is rewritten, brought home, handed over or dropped.

Note: exactness. The optimizer is a single object, and each step takes every parameter with a gradient. So a trial's
updates run one after the other, in the order of the requests, on any device's host thread. Units running meanwhile
leave gradients on stand-ins for the parameters (`ModelState.stand_ins`), invisible to the optimizer. The parameters of
an update are pinned on the host from before the request until the update is over, so a unit that needs such a parameter
waits. The trial's own code runs only after all updates of a step are over (`wait`).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from hydra_tune.devices.device import Device
from hydra_tune.errors import OutOfMemoryError
from hydra_tune.memory.block import Block
from hydra_tune.memory.block_release import HostBlockPin
from hydra_tune.memory.pressure import NotRepeatableError
from hydra_tune.shard.capture.capture_lock import GATE


class HostUpdateQueue:
    """The updates of one trial; only one thread at a time may start or await updates."""

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def start(
        self, device: Device, blocks: Sequence[Block], step: Callable[[], None], over: Callable[[int, int], None]
    ) -> None:
        """Start an update after all earlier updates.

        Args:
            device: device whose host thread runs the update.
            blocks: blocks of the parameters; pinned on the host until the update is over.
            step: runs the update.
            over: called with the update's begin and end, by the clock of `time.perf_counter_ns`; with the same time
                twice if the update failed.
        """
        home = HostBlockPin(blocks)
        try:
            self._last = device.start_on_host(partial(_make, self._last, step, home, over))
        except BaseException:
            # Otherwise the blocks would stay pinned on the host for ever.
            home.leave()
            raise

    def wait(self) -> None:
        """Wait until all updates are over.

        Raises:
            OutOfMemoryError: an update failed for lack of host memory.
            Exception: any error of the optimizer.
        """
        last_update, self._last = self._last, None
        if last_update is None:
            return
        try:
            last_update.result()
        except NotRepeatableError as error:
            raise OutOfMemoryError(
                f"the host ran out of memory in an update of the optimizer, and it cannot be repeated, because {error.reason} "
                f"({error.__cause__}); end other programs, lower host_memory or max_concurrent, or use "
                "optimizer_placement='device'"
            ) from error

    def wait_quietly(self) -> None:
        """Wait until all updates are over, and ignore their errors."""
        last_update, self._last = self._last, None
        if last_update is not None:
            last_update.exception()


def _make(
    before: Future[None] | None, step: Callable[[], None], home: HostBlockPin, over: Callable[[int, int], None]
) -> None:
    began_ns = ended_ns = time.perf_counter_ns()
    try:
        if before is not None:
            # Raises if an earlier update failed: no further update may follow on a half-updated state.
            before.result()
        with GATE.shared():
            began_ns = time.perf_counter_ns()
            step()
            ended_ns = time.perf_counter_ns()
    finally:
        home.leave()
        over(began_ns, max(began_ns, ended_ns))
