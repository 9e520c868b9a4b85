"""A CPU device whose trials have one default generator in turn, as those of a GPU have."""

import threading

import torch

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.own_generator import own_generator
from hydra_tune.devices.positions import MersennePositions


class OneGenerator(MersennePositions):
    """What operators draw from that are given no generator: on a thread that has one of its own, that very one."""

    def __init__(self):
        self.lock, self.num_turns = threading.Lock(), 0

    def get_state(self):
        return torch.Generator.get_state(own_generator() or torch.default_generator)

    def set_state(self, state):
        self.num_turns += 1
        torch.Generator.set_state(own_generator() or torch.default_generator, state.clone())

    def in_turn(self):
        return self.lock


class TurnsDevice(CpuDevice):
    """Only what a device does with random numbers is another than a CPU device's."""

    shares_generator = False

    def __init__(self, index, budget_bytes):
        super().__init__(index, budget_bytes)
        self.generator = OneGenerator()
