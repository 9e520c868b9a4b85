"""Runs a step's code on the host as if on a GPU: code may say `.to("cuda")` or `device="cuda:0"`.

A capture runs on the host (`graph_device.py`), while the code of a script often names the GPU. `preparing_for_gpus` says
that plans are made for GPUs; `PlanLibrary` (`shard/partition/plan_cache.py`) enters the context, and the step
(`step_module.py`) then runs in `as_on_gpu`. Within, a GPU's name means the host, a tensor that lies on a GPU has a copy
on the host, and a region of autocast without a dtype has the dtype that such a region has on a GPU.

Note: layers of torch compute otherwise while a mode of functions is active (`nn.TransformerEncoderLayer` has a fast path).
A capture has such modes anyway. An eager run, with which the capture is compared, has the mode only if an earlier
step within the same `preparing_for_gpus` has named a GPU or used a tensor there, or if no step has run yet.

Note: threads and writes. `preparing_for_gpus` holds for the calling thread alone. A step may read a tensor on a GPU, and
must not write such a tensor: the write would go to the copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from hydra_tune.errors import CaptureError

GPU = "cuda"
_HOST = torch.device("cpu")


@dataclass(slots=True)
class _StepsForGpus:
    """Steps that run on the host while a plan is made.

    Attributes:
        name_gpus: whether a step has named a GPU, or has used a tensor there; None before the first step.
    """

    name_gpus: bool | None = None


_steps: ContextVar[_StepsForGpus | None] = ContextVar("_steps", default=None)


@contextmanager
def preparing_for_gpus(is_for_gpus: bool) -> Iterator[None]:
    """Context in which steps run on the host as if on a GPU, or as what they are."""
    token = _steps.set(_StepsForGpus() if is_for_gpus else None)
    try:
        yield
    finally:
        _steps.reset(token)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Context of a step's code; changes nothing unless plans are made for GPUs."""
    steps = _steps.get()
    if steps is None:
        yield
        return
    dtype = torch.get_autocast_dtype("cpu")
    if not torch.is_autocast_enabled("cpu"):  # within a region, the dtype is the region's
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype(GPU))
    mode = _HostMode()
    try:
        with nullcontext() if steps.name_gpus is False and not _get_current_function_mode_stack() else mode:  # type: ignore[no-untyped-call]
            yield
    finally:
        steps.name_gpus = bool(steps.name_gpus) or mode.has_changed
        torch.set_autocast_dtype("cpu", dtype)


class _HostMode(TorchFunctionMode):
    """Puts the host in the place of each GPU that a call names, and a copy in the place of each tensor on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        # By identity; each original is kept, because another object could get the identity of a freed one.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.has_changed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            self.has_changed = True
            return args[0]
        if any(_is_elsewhere(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            self.has_changed = True
            self._refuse_writes(func, args, kwargs)
            args, kwargs = pytree.tree_map(self._on_host, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._renamed(kwargs["device"])}
        if func is Tensor.to and len(args) > 1:
            args = (args[0], self._renamed(args[1]), *args[2:])
        return func(*args, **kwargs)

    def _renamed(self, place: Any) -> Any:
        """Return the host in the place of a GPU, which code names by a number, too."""
        name = place.type if isinstance(place, torch.device) else place
        if type(name) is not int and not (isinstance(name, str) and name.partition(":")[0] == GPU):
            return place
        self.has_changed = True
        return _HOST

    def _on_host(self, leaf: Any) -> Any:
        if not _is_elsewhere(leaf):
            return leaf
        if id(leaf) not in self._copies:
            # Outside the modes of a capture, to which the copy has to look like a tensor that the code closes over.
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001
                self._copies[id(leaf)] = leaf, leaf.detach().cpu().requires_grad_(leaf.requires_grad)
        return self._copies[id(leaf)][1]

    @staticmethod
    def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write to a tensor on a GPU, which would go to the copy alone."""
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        written = kwargs.get("out", args[0] if args else None)
        if writes and any(_is_elsewhere(leaf) for leaf in pytree.tree_leaves(written)):
            raise CaptureError(
                f"the step writes ({name}) a tensor on a GPU that is no part of the model; make the tensor a buffer of the "
                "model (register_buffer)"
            )


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == GPU
