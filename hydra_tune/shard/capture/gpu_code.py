"""Runs a step's code on the host as if on a GPU: code may say `.to("cuda")` or `device="cuda:0"`.

A capture runs on the host (`graph_device.py`), while the code of a script often names the GPU. `preparing_for_gpus` says
that plans are made for GPUs; `PlanLibrary` (`shard/partition/plan_cache.py`) enters the context, and the step
(`step_module.py`) then runs in `as_on_gpu`. Within, a GPU's name means the host, a tensor that lies on a GPU has a copy
on the host, and a region of autocast without a dtype has the dtype that such a region has on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hydra_tune.errors import CaptureError

GPU = "cuda"
_HOST = torch.device("cpu")
_is_for_gpus: ContextVar[bool] = ContextVar("_is_for_gpus", default=False)


@contextmanager
def preparing_for_gpus(is_for_gpus: bool) -> Iterator[None]:
    """Context in which steps run on the host as if on a GPU, or as what they are."""
    token = _is_for_gpus.set(is_for_gpus)
    try:
        yield
    finally:
        _is_for_gpus.reset(token)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Context of a step's code; changes nothing unless plans are made for GPUs."""
    if not _is_for_gpus.get():
        yield
        return
    dtype = torch.get_autocast_dtype("cpu")
    if not torch.is_autocast_enabled("cpu"):  # within a region, the dtype is the region's
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype(GPU))
    try:
        with _HostMode():
            yield
    finally:
        torch.set_autocast_dtype("cpu", dtype)


class _HostMode(TorchFunctionMode):
    """Puts the host in the place of each GPU that a call names, and a copy in the place of each tensor on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        # By identity; each original is kept, because another object could get the identity of a freed one.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        names_place = "device" in kwargs or func is Tensor.to
        if names_place or any(_is_elsewhere(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            self._refuse_writes(func, args, kwargs)
            args, kwargs = pytree.tree_map(self._on_host, (args, kwargs))
            if names_place:
                args, kwargs = _renamed(args, kwargs)
            if func is Tensor.to and len(args) > 1 and type(args[1]) is int:  # the number of a GPU
                args = (args[0], _HOST, *args[2:])
        return func(*args, **kwargs)

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


def _renamed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the host in the place of each GPU."""

    def renamed(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == GPU:
            return _HOST
        return _HOST if isinstance(value, str) and value.partition(":")[0] == GPU else value

    named = dict(kwargs)
    if "device" in named:
        named["device"] = _HOST if type(named["device"]) is int else renamed(named["device"])
    return tuple(renamed(arg) for arg in args), named
