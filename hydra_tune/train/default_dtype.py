"""Changes of torch's default dtype by a user's function, kept away from the steps of other trials.

`from_pretrained` of transformers sets the default dtype of the process to the model's for as long as the model is made. A step
on another thread would meanwhile make tensors, and divide integers, in that dtype. `own_build` (`building.py`) enters
`own_default_dtype` around functions that build models, and the study of Optuna (`integrations/hydra_tune_optuna`) around
objectives. Other threads of the user's, and steps, change the default dtype as without a pool.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture.capture_lock import GATE

_SET = torch.set_default_dtype


class _OwnChange(threading.local):
    """The change that this thread has made and not yet undone.

    Attributes:
        is_watched: whether the thread is in `own_default_dtype`.
        before: default dtype before the change; None: there is no change.
        alone: keeps computations of other threads out while there is a change.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.before: torch.dtype | None = None
        self.alone = ExitStack()

    def set(self, dtype: torch.dtype) -> None:
        """In the place of `torch.set_default_dtype`."""
        if not self.is_watched:
            _SET(dtype)
            return
        if self.before is None:
            with GATE.shared():  # waits while another thread has changed the dtype
                if dtype == torch.get_default_dtype():
                    return
            self.alone.enter_context(GATE.alone_inside())
            self.before = torch.get_default_dtype()
        _SET(dtype)
        if torch.get_default_dtype() == self.before:
            self.end()

    def end(self) -> None:
        self.before = None
        self.alone.close()


_CHANGE = _OwnChange()


def has_own_change() -> bool:
    """Whether this thread has changed the default dtype, and not yet set the dtype back."""
    return _CHANGE.before is not None


@contextmanager
def own_default_dtype() -> Iterator[None]:
    """Context of a user's function that may set torch's default dtype: no other trial computes until the dtype is set back.

    Others compute where the function itself waits for the pool (`CaptureGate.left`).

    Raises:
        TaskError: the function has not set the dtype back.
    """
    if _CHANGE.is_watched:
        yield
        return
    torch.set_default_dtype = _CHANGE.set
    _CHANGE.is_watched = True
    try:
        yield
        if _CHANGE.before is not None:
            raise TaskError(
                f"a function that builds a model or a task has left torch's default dtype at {torch.get_default_dtype()}; all "
                f"trials of the process share the default, which was {_CHANGE.before}; call torch.set_default_dtype before the "
                "first trial, or set the default back in the function, or give the model's parts a dtype"
            )
    finally:
        _CHANGE.is_watched = False
        if _CHANGE.before is not None:
            _SET(_CHANGE.before)
            _CHANGE.end()
