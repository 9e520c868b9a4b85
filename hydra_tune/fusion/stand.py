"""`Stand`: a device that steps are profiled on, for plans of steps that run on all of its kind."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stand:
    """A device to profile on.

    Attributes:
        place: where its tensors are.
        rounding: bytes to which its allocator rounds, for plans that its memory really has to have room for; 1: it need not.
        borrowed: entered around what is run there; else it is the pool's.
    """

    place: torch.device
    rounding: int = 1
    borrowed: Callable[[], AbstractContextManager[object]] = nullcontext


HOST = Stand(torch.device("cpu"))
