"""A trial's own random streams, which its code draws from wherever it draws from the process's.

Torch's operators on CPU, the functions of `random` and those of `numpy.random` ask for the stream of the thread that calls them
(`devices/own_generator.py`, `own_python.py`, `own_numpy.py`). So a trial's code has its streams on its own thread, nobody waits
for them, and no other thread draws from them or seeds them. Threads that the code starts draw from the process's streams.
Generators of GPUs are one per device and used by that device's worker alone.
"""

import copy
import importlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hydra_tune.devices import own_generator
from hydra_tune.devices.device import Device, RandomGenerator
from hydra_tune.devices.own_generator import OwnGenerator, drawing_from
from hydra_tune.train import own_python
from hydra_tune.train.own_python import PythonStream

_LOCK = threading.Lock()


def _own_numpy() -> Any:
    """The module of numpy's streams, where there is numpy."""
    return importlib.import_module("hydra_tune.train.own_numpy") if importlib.util.find_spec("numpy") else None


def _install(own_numpy: Any) -> None:
    """Have all that draws ask for its thread's streams; once for the process."""
    with _LOCK:
        own_generator.install()
        replaced = own_python.install()
        if own_numpy is not None:
            replaced |= own_numpy.install()
        own_python.replace_everywhere(replaced)


class RandomStreams:
    """The random streams of one trial, from its seed on.

    Args:
        seed: as a plain loop would give to `torch.manual_seed`, `numpy.random.seed` and `random.seed`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        own_numpy = _own_numpy()
        _install(own_numpy)
        self._torch = OwnGenerator()
        self._torch.manual_seed(seed)
        self._python = PythonStream(seed)
        self._numpy: Any = None if own_numpy is None else own_numpy.NumpyStream.of_seed(seed)
        self._host_streams: list[Any] = [self._torch, self._python] + ([] if self._numpy is None else [self._numpy])
        self._gpu_state: Tensor | None = None
        self._drawn_from: RandomGenerator | None = None  # a GPU's, while it is this trial's stream there that moves

    def fork(self) -> "RandomStreams":
        """The torch streams from here on, but apart, for captured units: what one draws does not move the other's."""
        other = copy.copy(self)
        apart = OwnGenerator()
        apart.set_state(self._torch.get_state())
        vars(other).update(_torch=apart, _python=None, _numpy=None, _host_streams=[], _drawn_from=None)
        return other

    @property
    def generator(self) -> torch.Generator:
        """What captured units on CPU devices draw from."""
        return self._torch

    def position(self, device: Device) -> Tensor:
        """Where the stream stands that captured units draw from on such a device."""
        return self._torch.get_state() if device.shares_generator else self.gpu_state(device)

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
        return self._torch.get_state(), self._gpu_position()

    def go_back(self, mark: Any) -> None:
        """Have these streams stand where they stood; on the thread that draws, if any does."""
        self._torch.set_state(mark[0])
        self._set_gpu_position(mark[1])

    def skip(self, count: int, device: Device) -> None:
        """Move that stream on by so many draws, as the device's generator counts them; no unit draws from it meanwhile."""
        moved = device.generator.moved(self.position(device), count)
        if device.shares_generator:
            self._torch.set_state(moved)
        else:
            self._gpu_state = moved

    def state(self) -> dict[str, Any]:
        """Where all streams stand, for `restore`: plain values and tensors."""
        return {
            "torch": self._torch.get_state(),
            "python": self._python.getstate(),
            "numpy": None if self._numpy is None else self._numpy.state(),
            "gpu": self._gpu_position(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have the streams stand where others stood; on the thread that draws, if any does."""
        self._torch.set_state(state["torch"].clone())  # torch reads past the start of a view
        self._python.setstate(state["python"])
        if self._numpy is not None and state["numpy"] is not None:
            self._numpy.restore(state["numpy"])
        self._set_gpu_position(state["gpu"])

    def _gpu_position(self) -> Tensor | None:
        return self._gpu_state if self._drawn_from is None else self._drawn_from.get_state()

    def _set_gpu_position(self, state: Tensor | None) -> None:
        self._gpu_state = state
        if self._drawn_from is not None and state is not None:
            self._drawn_from.set_state(state)

    def moves(self) -> int:
        """How often the code of the trial has drawn from its streams on the host, or set them."""
        moves = 0
        for stream in self._host_streams:  # several times a step, where `sum` takes three times as long
            moves += stream.moves
        return moves

    def everything(self) -> AbstractContextManager[None]:
        """The torch CPU, numpy and Python streams of this thread are the trial's; what there was before comes back."""
        assert self._host_streams, "a fork of streams is for captured units, which draw from torch's alone"
        return _Everything(self._host_streams)

    def drawing(self, device: Device | None, *, keep: bool) -> AbstractContextManager[None]:
        """The device's generator is the trial's, for a captured unit that draws, or an update.

        Args:
            device: where the unit runs; None: on the host, beside a device.
            keep: whether the stream moves on; a recompute draws the same numbers again and leaves it.
        """
        if device is None or device.shares_generator:
            return self._drawing_on_host(keep=keep)
        return self._drawing_on_gpu(device, keep=keep)

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
            before, self._drawn_from = self._drawn_from, device.generator if keep else None
            try:
                yield
            finally:
                self._drawn_from = before
                if keep:
                    self._gpu_state = device.generator.get_state()


class _Everything:
    """Around code that draws from some streams."""

    __slots__ = ("_streams", "_tokens")

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._tokens = [stream.become_own() for stream in self._streams]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for token in self._tokens:
            token.var.reset(token)
