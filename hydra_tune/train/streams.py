"""A trial's own random streams, swapped in whenever its code runs.

Torch's operators on CPU are made to draw from the trial's own generator (`devices/own_generator.py`), whatever else the process
draws. Numpy's and Python's streams are one each per process, so only one trial can have its own swapped in at a time: `STREAMS`
is that lock, which is taken away from a loader that hangs and is given up on (`train/drawing.py`). Note: lock order. Whoever
needs both takes `STREAMS` first and the capture gate inside. A thread that is not the pool's takes no lock, so what it draws
from these two while they are swapped in, it draws from the trial.
Generators of GPUs are one per device and used by that device's worker alone, so they need no lock.
"""

import copy
import ctypes
import importlib
import importlib.util
import random
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from hydra_tune.devices.device import Device
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.train.turns import Turns

STREAMS = Turns()
_BLOCK = 624  # numbers that the Mersenne Twister makes at once
_INSIDE_BLOCK = slice(512, 4608)  # bytes of a generator's state that are the block's, whatever lies around it
_MAX_DRAWS = 100_000 * _BLOCK  # looked for, in less than a second; dropout draws one or two for each element
_CHUNK = 1 << 18


def draws_between(before: Tensor, after: Tensor) -> int | None:
    """By how many draws of `RandomStreams.skip` a stream has moved from one position to another; None if that is not found.

    The generator (a Mersenne Twister) makes its numbers in blocks, and most of its state is the block: first the block is
    found, then the place in it.
    """
    stream = torch.Generator()
    last, start = before, 0
    for count in range(0, _MAX_DRAWS, _BLOCK):
        stream.set_state(last)
        _skip(stream, _BLOCK if count else 0)
        state = stream.get_state()
        if torch.equal(state[_INSIDE_BLOCK], after[_INSIDE_BLOCK]):
            break
        last, start = state, count
    stream.set_state(last)
    for count in range(start, start + 2 * _BLOCK + 1):
        if torch.equal(stream.get_state(), after):
            return count
        _skip(stream, 1)
    return None


def _skip(stream: torch.Generator, count: int) -> None:
    for first in range(0, count, _CHUNK):
        torch.empty(min(_CHUNK, count - first), dtype=torch.float32).random_(generator=stream)


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

    def fork(self) -> "RandomStreams":
        """The same streams from here on, but apart, for captured units: what one draws does not move the other's."""
        other = copy.copy(self)
        apart = torch.Generator()
        apart.set_state(self._torch.get_state())
        vars(other)["_torch"] = apart
        return other

    @property
    def generator(self) -> torch.Generator:
        """What captured units on CPU devices draw from."""
        return self._torch

    def position(self) -> Tensor:
        """Where the torch CPU stream stands."""
        return self._torch.get_state()

    def gpu_state(self, device: Device) -> Tensor:
        """Where the stream stands that captured units on GPUs draw from, as a GPU's default generator gives it."""
        if self._gpu_state is None:
            self._gpu_state = torch.Generator(device.torch_device).manual_seed(self._seed).get_state()
        return self._gpu_state

    def keep_gpu_state(self, state: Tensor) -> None:
        """That stream stands here from now on."""
        self._gpu_state = state

    def mark(self) -> Any:
        """Where the streams stand that captured units draw from, for `go_back`."""
        return self._torch.get_state(), self._gpu_state

    def go_back(self, mark: Any) -> None:
        """Have these streams stand where they stood; not while anything draws."""
        self._torch.set_state(mark[0])
        self._gpu_state = mark[1]

    def skip(self, count: int) -> None:
        """Move the torch CPU stream on, as `draws_between` counts."""
        _skip(self._torch, count)

    def state(self) -> dict[str, Any]:
        """Where all streams stand, for `restore`: plain values and tensors."""
        return {
            "torch": self._torch.get_state(),
            "python": self._python_state,
            "numpy": self._numpy_state,
            "gpu": self._gpu_state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have the streams stand where others stood; not while anything draws."""
        self._torch.set_state(state["torch"].clone())  # torch reads past the start of a view
        self._python_state = state["python"]
        if self._numpy is not None and state["numpy"] is not None:
            self._numpy_state = state["numpy"]
        self._gpu_state = state["gpu"]

    def mark_of_all(self) -> Hashable:
        """Another value whenever any stream has moved that code on the host draws from."""
        torch_state, numpy_state = self._torch.get_state(), self._numpy_state
        own = ctypes.string_at(torch_state.data_ptr(), torch_state.numel())
        drawn = None if numpy_state is None else (numpy_state[1].tobytes(), *numpy_state[2:])
        return hash((own, self._python_state, drawn))

    @contextmanager
    def everything(self) -> Iterator[None]:
        """The torch CPU, numpy and Python streams are the trial's; what was there before comes back."""
        with STREAMS, drawing_from(self._torch):
            before = random.getstate(), self._numpy and self._numpy.random.get_state()

            def restore() -> None:
                random.setstate(before[0])
                if self._numpy is not None:
                    self._numpy.random.set_state(before[1])

            self._swap_in()
            STREAMS.begin(restore)
            try:
                yield
            finally:
                if STREAMS.is_held:  # else the trial was given up on, and what is there now is another's
                    STREAMS.end()
                    self._save()
                    restore()

    def torch_alone(self) -> AbstractContextManager[None]:
        """The torch CPU stream is the trial's; for code that is known to draw from no other, and need not wait for its turn."""
        return drawing_from(self._torch)

    def drawing(self, device: Device, *, keep: bool) -> AbstractContextManager[None]:
        """The device's generator is the trial's, for a captured unit that draws.

        Args:
            device: where the unit runs.
            keep: whether the stream moves on; a recompute draws the same numbers again and leaves it.
        """
        if not device.shares_generator:
            return self._drawing_on_gpu(device, keep=keep)
        return self._drawing_on_host(keep=keep)

    @contextmanager
    def _drawing_on_host(self, *, keep: bool) -> Iterator[None]:
        before = None if keep else self._torch.get_state()
        with drawing_from(self._torch):
            try:
                yield
            finally:
                if before is not None:
                    self._torch.set_state(before)

    @contextmanager
    def _drawing_on_gpu(self, device: Device, *, keep: bool) -> Iterator[None]:
        state = self.gpu_state(device)
        with device.generator.in_turn():
            device.generator.set_state(state)
            try:
                yield
            finally:
                if keep:
                    self._gpu_state = device.generator.get_state()

    def _swap_in(self) -> None:
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)

    def _save(self) -> None:
        self._python_state = random.getstate()
        if self._numpy is not None:
            self._numpy_state = self._numpy.random.get_state()
