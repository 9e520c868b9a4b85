"""Copies in the background under control: a CPU device where they wait at a gate, or fail; a disk that has settled."""

import threading
from concurrent.futures import Future

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.memory.block_states import BlockState

PATIENCE_SECONDS = 60


class GatedDevice(CpuDevice):
    """Copies in the background wait until `gate` is set, and then raise `error` if there is one."""

    def __init__(self, index, budget_bytes):
        super().__init__(index, budget_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error = None

    def _send(self, pairs, *, is_waited_for):
        self._pass_gate(is_waited_for)
        super()._send(pairs, is_waited_for=is_waited_for)

    def _take(self, source, pairs, *, is_waited_for):
        self._pass_gate(is_waited_for)
        super()._take(source, pairs, is_waited_for=is_waited_for)

    def _pass_gate(self, is_waited_for):
        if not is_waited_for:
            self.begun.set()
            assert self.gate.wait(PATIENCE_SECONDS)
            if self.error is not None:
                raise self.error


def state_of(block):
    """The state that a block of a pager must be in, told from where its bytes are."""
    if block.home is None:
        elsewhere = BlockState.HOST if block.host is not None else BlockState.DISK
        return elsewhere if block.coming is None else BlockState.LOADING
    if block.leaving is not None:
        return BlockState.SPILLING
    return BlockState.COMPUTING if block.pinned_for is block.home else BlockState.RESIDENT


def settle(host):
    """Wait until the disk's thread of a host tier looks ahead no more; nobody may ask it to meanwhile."""
    looks = True
    while looks:
        seen: Future[bool] = Future()
        host.disk.start(lambda seen=seen: seen.set_result(host._is_looking_ahead))  # there, nothing else runs meanwhile
        looks = seen.result(PATIENCE_SECONDS)
