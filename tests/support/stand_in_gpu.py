"""Devices that stand for GPUs in all but streams: not the host's, with one default generator in turn, and large allocations."""

import threading

from tests.support.turns import OneGenerator, TurnsDevice


class Generator(OneGenerator):
    """One thread at a time, which may enter again within, as `CudaGenerator` has it; all of these are one generator."""

    one = threading.RLock()

    def __init__(self):
        super().__init__()
        self.lock = self.one


class StandInGpu(TurnsDevice):
    """Its tensors are the host's, so that copies and clocks are those of CPU devices."""

    is_host = False

    def __init__(self, index, budget_bytes):
        super().__init__(index, budget_bytes)
        self.alignment = 512
        self.generator = Generator()
        self.num_reclaimed = 0

    def reclaim(self):
        self.num_reclaimed += 1
        return super().reclaim()
