"""A trial's own random streams, in place of the process's streams for all code of the trial.

Torch's operators on CPU, the functions of `random` and the functions of `numpy.random` look up the stream of the calling
thread (`devices/own_generator.py`, `own_python.py`, `own_numpy.py`). So a trial's code draws from the trial's streams
without a turn. Functions of `numpy.random` alone take a lock that all threads share, for the length of a call. Threads
started by the code draw from the process's streams, and so do functions of `random` held where `own_python.py` cannot
replace functions. Each GPU has a default generator of its own: a unit that draws there takes the generator's turn and sets
the trial's position. Unless the unit is a recompute, the unit reads the position again at its end.

`Trial` (`train/trial.py`) makes the streams from the task's seed. `Trial` and its subclasses enter the streams around each
call of the trial's own code, and bursts (`train/loop/burst.py`) for their whole length. `BatchUnits`
(`train/loop/batch_units.py`) enters the streams around each eager unit, and around each captured unit that draws.
`TrialPlanCache` (`train/loop/plan_cache.py`) and `fusion/compile/batched_plan_cache.py` enter the streams to prepare plans.
`UnitRollback` (`train/loop/unit_rollback.py`) and `WholeModelRunner` (`train/loop/direct.py`) set the streams back.
`OptimizerStep` (`train/loop/optimizer_step.py`) forks the streams for each batch drawn ahead, and a fused group draws from
its members' streams (`fusion/group/group_rng.py`). `SharedModule` (`train/shared_module.py`), the pool's workers and
preparers and others make streams for code that must leave the process's streams alone.

Note: bits. A plain loop's `torch.manual_seed`, `numpy.random.seed` and `random.seed` set the same positions. Captured units
draw from torch's stream alone.

Note: locks. A unit on a GPU takes the generator's turn before the capture gate.
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
from hydra_tune.devices.own_generator import ThreadGenerator, drawing_from
from hydra_tune.train.rng import own_python
from hydra_tune.train.rng.own_python import PythonStream

_LOCK = threading.Lock()


def _own_numpy() -> Any:
    return importlib.import_module("hydra_tune.train.rng.own_numpy") if importlib.util.find_spec("numpy") else None


def _install(own_numpy: Any) -> None:
    """Route drawing functions to the calling thread's streams; a later call in the process changes nothing."""
    with _LOCK:
        own_generator.install()
        replaced = own_python.install()
        if own_numpy is not None:
            replaced |= own_numpy.install()
        own_python.replace_everywhere(replaced)


class RandomStreams:
    """The random streams of a trial, from a seed on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        own_numpy = _own_numpy()
        _install(own_numpy)
        self._torch = ThreadGenerator()
        self._torch.manual_seed(seed)
        self._python = PythonStream(seed)
        self._numpy: Any = None if own_numpy is None else own_numpy.NumpyStream.of_seed(seed)
        self._host_streams: list[Any] = [self._torch, self._python] + ([] if self._numpy is None else [self._numpy])
        self._gpu_state: Tensor | None = None
        # A GPU's generator, while it moves this trial's stream.
        self._drawn_from: RandomGenerator | None = None

    def fork(self) -> "RandomStreams":
        """Return independent torch streams at the present position, for captured units."""
        forked = copy.copy(self)
        generator = ThreadGenerator()
        generator.set_state(self._torch.get_state())
        vars(forked).update(_torch=generator, _python=None, _numpy=None, _host_streams=[], _drawn_from=None)
        return forked

    @property
    def generator(self) -> torch.Generator:
        """Generator of captured units on CPU devices."""
        return self._torch

    def position(self, device: Device) -> Tensor:
        """Return the position of the stream of captured units on such a device."""
        return self._torch.get_state() if device.shares_generator else self.gpu_state(device)

    def gpu_state(self, device: Device) -> Tensor:
        """Return the position of the stream of captured units on GPUs, as a state of a GPU's default generator."""
        if self._gpu_state is None:
            self._gpu_state = torch.Generator(device.torch_device).manual_seed(self._seed).get_state()
        return self._gpu_state

    def keep_gpu_state(self, state: Tensor) -> None:
        """Set the position of the stream of captured units on GPUs."""
        self._gpu_state = state

    def mark(self) -> Any:
        """Return the positions of the streams of captured units, for `go_back`."""
        return self._torch.get_state(), self._gpu_position()

    def go_back(self, mark: Any) -> None:
        """Set the streams back to the positions from `mark`; on the thread that draws, if any does."""
        self._torch.set_state(mark[0])
        self._set_gpu_position(mark[1])

    def skip(self, count: int, device: Device) -> None:
        """Advance the stream of captured units by a number of draws, as the device's generator counts draws.

        No unit may draw from the stream meanwhile.
        """
        position = device.generator.moved(self.position(device), count)
        if device.shares_generator:
            self._torch.set_state(position)
        else:
            self._gpu_state = position

    def state(self) -> dict[str, Any]:
        """Return the positions of all streams, for `restore`, as plain values and tensors."""
        return {
            "torch": self._torch.get_state(),
            "python": self._python.getstate(),
            "numpy": None if self._numpy is None else self._numpy.state(),
            "gpu": self._gpu_position(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the streams to positions from `state`; on the thread that draws, if any does."""
        # A clone, because torch reads past the start of a view.
        self._torch.set_state(state["torch"].clone())
        self._python.setstate(state["python"])
        if self._numpy is not None and state["numpy"] is not None:
            self._numpy.restore(state["numpy"])
        self._set_gpu_position(state["gpu"])

    def _gpu_position(self) -> Tensor | None:
        return self._gpu_state if self._drawn_from is None else self._drawn_from.get_state()

    def _set_gpu_position(self, state: Tensor | None) -> None:
        self._gpu_state = state
        # A running unit would overwrite `_gpu_state` at its end with the generator's position.
        if self._drawn_from is not None and state is not None:
            self._drawn_from.set_state(state)

    def moves(self) -> int:
        """Return how often the trial's code has drawn from or set the host streams."""
        moves = 0
        # A loop, because this runs several times a step and `sum` takes three times as long.
        for stream in self._host_streams:
            moves += stream.moves
        return moves

    def everything(self) -> AbstractContextManager[None]:
        """Make the torch CPU, numpy and Python streams of this thread the trial's inside the context."""
        assert self._host_streams, "a fork of streams is for captured units, which draw from torch's alone"
        return _RandomStreamContext(self._host_streams)

    def drawing(self, device: Device | None, *, keep: bool) -> AbstractContextManager[None]:
        """Make the device's generator the trial's inside the context, for a captured unit that draws.

        Args:
            device: device of the unit; None: on the host, beside a device.
            keep: whether the stream moves on; a recompute draws the same numbers again and leaves the stream.
        """
        if device is None or device.shares_generator:
            return drawing_on_host(self._torch, keep=keep)
        return self._drawing_on_gpu(device, keep=keep)

    @contextmanager
    def updating(self, device: Device | None) -> Iterator[None]:
        """Make the streams the trial's around an update, because the optimizer's own code may draw.

        On a GPU's worker, torch's draws on the host are not the trial's.

        Args:
            device: device of the update; None: on the host.
        """
        with self.drawing(device, keep=True), self.of_python():
            yield

    def of_python(self) -> AbstractContextManager[None]:
        """Make the numpy and Python streams of this thread the trial's inside the context."""
        return _RandomStreamContext(self._host_streams[1:])

    @contextmanager
    def _drawing_on_gpu(self, device: Device, *, keep: bool) -> Iterator[None]:
        state = self.gpu_state(device)
        with device.generator.in_turn():
            device.generator.set_state(state)
            # While the unit runs, the GPU's generator holds the present position of a stream that moves, and not
            # `_gpu_state`.
            outer_generator, self._drawn_from = self._drawn_from, device.generator if keep else None
            try:
                yield
            finally:
                self._drawn_from = outer_generator
                if keep:
                    self._gpu_state = device.generator.get_state()


@contextmanager
def drawing_on_host(generator: torch.Generator, *, keep: bool) -> Iterator[None]:
    """Have operators on the host draw from a generator inside the context.

    Args:
        generator: of a trial, or of the members of a group.
        keep: as of `RandomStreams.drawing`.
    """
    position_before = None if keep else generator.get_state()
    with drawing_from(generator):
        try:
            yield
        finally:
            if position_before is not None:
                generator.set_state(position_before)


class _RandomStreamContext:
    """Context of code that draws from the given streams."""

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
