"""`SharedModule`: one frozen base model for all trials of a pool, for adapters, probes and heads.

People import `SharedModule` from `hydra_tune` and call `module` in the `model=` of a `TrainTask`. The bytes of the base lie
once in host memory (`memory/shared/shared_file.py`); a trial's state finds the shared parameters by their place
(`train/state/shared_state.py`). The module knows nothing of trials, pools and devices.

Note: locks. Trials call `module` on several threads. The first call builds the base under the lock, and the others wait, so
`build` must not call `module` of the same object. The turn of `own_build` (`building.py`) comes before the lock.
A thread that waits for the lock leaves the gate and gives up its turn.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hydra_tune.errors import TaskError
from hydra_tune.memory.shared.shared_file import SharedFile, unseen
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.train.building import own_build
from hydra_tune.train.rng.rng_streams import RandomStreams


class SharedModule:
    """A frozen model that many trials build upon, with a single copy of its bytes.

    The model is built at its first use, from random streams of its own, so a trial draws the same numbers whether or not
    the trial is the first. All its parameters are frozen. Each `module()` is a model of its own: other modules may replace
    its parts, and its parameters may be thawed or overwritten, which gives the writer's trial bytes of its own and changes
    no other trial. `train_plain` with the same object trains on the same base.

    Args:
        build: builds the model on the host, without arguments. For a pool in a process of its own (`isolate=True`), or for
            pickling, a function at the top of a module or a `functools.partial` of one.
        seed: seed of the random streams from which `build` draws.

    Example::

        base = SharedModule(partial(LlamaForCausalLM, config))
        tasks = [TrainTask(model=partial(with_lora, base, rank), ...) for rank in (4, 8, 16)]

        def with_lora(base, rank):
            return get_peft_model(base.module(), LoraConfig(r=rank))
    """

    def __init__(self, build: Callable[[], nn.Module], *, seed: int = 0) -> None:
        if not callable(build) or isinstance(build, nn.Module):
            raise TaskError(
                f"SharedModule needs a function that builds the model, but got {type(build).__name__}; pass the class or a "
                "functools.partial"
            )
        self._build = build
        self._seed = seed
        self._lock = threading.Lock()
        self._model: nn.Module | None = None
        self._file: SharedFile | None = None

    def module(self, *, copy: bool = False) -> nn.Module:
        """Return a new model with the bytes of the base.

        Args:
            copy: whether parameters and buffers get memory of their own now. Otherwise they show the base's bytes until
                they are written, and a pool counts, loads and keeps the parameters that stay frozen once for all trials.

        Returns:
            The model, with all parameters frozen, in the mode in which `build` left it.

        Raises:
            TaskError: `build` returned no module, or a module with tensors outside of host memory.
            HydraTuneError: the host has no room for the base.
        """
        with own_build(), self._locked():
            if self._model is None:
                model = self._built()
                # A look at the sizes of a model that is too large to build: nothing to keep.
                if any(isinstance(tensor, FakeTensor) for _, tensor in named_state(model)):
                    return model
                self._model, self._file = model, self._filed(model)
            model, file = self._model, self._file
            return _copied(model, {} if copy or file is None else file.mapped())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Outside the gate and without the turn, because the thread with the lock may need to be alone or to build.
        is_locked = self._lock.acquire(blocking=False)
        try:
            if not is_locked:
                with GATE.left():
                    is_locked = self._lock.acquire()
            yield
        finally:
            if is_locked:
                self._lock.release()

    @property
    def nbytes(self) -> int:
        """Host memory of the base in bytes; 0 before its first use."""
        return 0 if self._file is None else self._file.nbytes

    def _built(self) -> nn.Module:
        with RandomStreams(self._seed).everything(), torch.enable_grad():
            model = self._build()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"build= of a SharedModule must return a torch.nn.Module, but returned {type(model).__name__}"
            )
        for name, tensor in named_state(model):
            if tensor.device.type != "cpu":
                raise TaskError(
                    f"build= of a SharedModule returned {name!r} on {tensor.device}; build the model on the host, and the pool "
                    "loads it to its devices"
                )
        for parameter in model.parameters():
            parameter.requires_grad = False
            parameter.grad = None
        return model

    @staticmethod
    def _filed(model: nn.Module) -> SharedFile | None:
        """Put the model's bytes into a shared file, and have the model show the file."""
        tensors = {name: tensor for name, tensor in named_state(model) if _is_plain(tensor)}
        if not tensors:
            return None
        file = SharedFile(tensors)
        for name, place in file.mapped().items():
            tensors[name].data = place
        return file

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: a copy would hold the bytes twice."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the recipe: the other process builds the same base at its first use there."""
        return {"build": self._build, "seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a recipe."""
        self.__init__(state["build"], seed=state["seed"])  # type: ignore[misc]  # as a new object


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor can lie in a file: dense, not empty, and of no class with a layout of its own."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )


def _copied(model: nn.Module, places: dict[str, Tensor]) -> nn.Module:
    """Copy a model, with the named parameters and buffers at the given places; other tensors are copied."""
    memo: dict[int, Any] = {}
    for name, tensor in named_state(model):
        place = places.get(name)
        if place is None:
            continue
        if isinstance(tensor, nn.Parameter):
            with unseen():
                place = nn.Parameter(place, requires_grad=False)
        # Marks that libraries leave on their parameters.
        vars(place).update(vars(tensor))
        memo[id(tensor)] = place
    return copy.deepcopy(model, memo)
