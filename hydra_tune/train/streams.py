"""A trial's own random streams, swapped in whenever its code runs.

Torch's default CPU generator, numpy's and Python's are one each per process, so only one trial can have its streams swapped
in at a time: `STREAMS` is that lock. Note: lock order. Whoever needs both takes `STREAMS` first and the capture gate inside.
Captured units that can draw from any generator (`shard/draws.py`) draw from the trial's own and need no lock.
Generators of GPUs are one per device and used by that device's worker alone, so they need no lock.
"""

import importlib
import importlib.util
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from hydra_tune.devices.cpu import drawing_from
from hydra_tune.devices.device import Device

STREAMS = threading.RLock()


class RandomStreams:
    """The random streams of one trial, from its seed on.

    Args:
        seed: as a plain loop would give to `torch.manual_seed`, `numpy.random.seed` and `random.seed`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numpy: Any = None
        if importlib.util.find_spec("numpy") is not None:
            self._numpy = importlib.import_module("numpy")
        self._torch = torch.Generator().manual_seed(seed)
        self._python_state = random.Random(seed).getstate()  # noqa: S311 - not for secrets
        self._numpy_state = None if self._numpy is None else self._numpy.random.RandomState(seed).get_state()
        self._gpu_state: Tensor | None = None

    @contextmanager
    def everything(self) -> Iterator[None]:
        """The torch CPU, numpy and Python streams are the trial's; what was there before comes back."""
        with STREAMS:
            before = torch.get_rng_state(), random.getstate(), self._numpy and self._numpy.random.get_state()
            self._swap_in()
            try:
                yield
            finally:
                self._save()
                torch.set_rng_state(before[0])
                random.setstate(before[1])
                if self._numpy is not None:
                    self._numpy.random.set_state(before[2])

    def drawing(self, device: Device, *, keep: bool, own: bool) -> AbstractContextManager[None]:
        """The device's generator is the trial's, for a captured unit that draws.

        Args:
            device: where the unit runs.
            keep: whether the stream moves on; a recompute draws the same numbers again and leaves it.
            own: whether the unit draws from its thread's own generator; if not, other trials wait.
        """
        if not device.shares_generator:
            return self._drawing_on_gpu(device, keep=keep)
        return self._drawing_apart(keep=keep) if own else self._drawing_in_turn(keep=keep)

    @contextmanager
    def _drawing_apart(self, *, keep: bool) -> Iterator[None]:
        before = None if keep else self._torch.get_state()
        with drawing_from(self._torch):
            try:
                yield
            finally:
                if before is not None:
                    self._torch.set_state(before)

    @contextmanager
    def _drawing_in_turn(self, *, keep: bool) -> Iterator[None]:
        with STREAMS:
            before = torch.get_rng_state()
            torch.set_rng_state(self._torch.get_state())
            try:
                yield
            finally:
                if keep:
                    self._torch.set_state(torch.get_rng_state())
                torch.set_rng_state(before)

    @contextmanager
    def _drawing_on_gpu(self, device: Device, *, keep: bool) -> Iterator[None]:
        if self._gpu_state is None:
            self._gpu_state = torch.Generator(device.torch_device).manual_seed(self._seed).get_state()
        device.generator.set_state(self._gpu_state)
        try:
            yield
        finally:
            if keep:
                self._gpu_state = device.generator.get_state()

    def _swap_in(self) -> None:
        torch.set_rng_state(self._torch.get_state())
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)

    def _save(self) -> None:
        self._torch.set_state(torch.get_rng_state())
        self._python_state = random.getstate()
        if self._numpy is not None:
            self._numpy_state = self._numpy.random.get_state()
