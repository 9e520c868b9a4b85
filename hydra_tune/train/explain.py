"""Explanations of torch's own errors for common mistakes of a task, with the argument at fault and a remedy.

`Job` (`pool/job.py`) and `train_plain` (`train/loop/reference_loop.py`) call `explained` where they end with an error,
so all ways of running trials give the same messages. The module knows nothing of jobs, and must not know the pool or the
scheduler.
"""

import re
from dataclasses import dataclass

from hydra_tune.errors import HydraTuneError, TaskError, first_line
from hydra_tune.shard.capture.step_capture import is_user_file, user_line

_DEVICE = (
    "the task asks for a GPU, and torch finds none here; leave .to('cuda'), .cuda() and device='cuda' out: the pool puts "
    "module and batches on its devices, and a tensor made in forward follows its input: torch.zeros(n, device=x.device)"
)
_TWICE = (
    "torch was asked to differentiate a step twice, for example because step= or loss= calls backward() itself; return the "
    "loss, and leave backward(), optimizer.step() and zero_grad() to hydra-tune"
)
_NO_GRADIENT = (
    "the training loss has no gradient, for example after .detach(), .item() or torch.no_grad(), with every parameter frozen, "
    "or because step= calls backward() itself; return the loss as the tensor computed from the module's parameters"
)
_THREAD = (
    "a pool draws a trial's batches on any of its threads, and an SQLite connection belongs to the thread that opened it; open "
    "it with sqlite3.connect(..., check_same_thread=False) where trials only read, or keep a connection for each thread in a "
    "threading.local()"
)


@dataclass(frozen=True, slots=True)
class _ErrorExplanation:
    """A known error, by class and text, and its explanation."""

    kind: type[Exception]
    text: re.Pattern[str]
    told: str


_ALL = (
    # A torch built without CUDA raises an AssertionError, a torch with CUDA on a machine without a GPU a RuntimeError.
    _ErrorExplanation(AssertionError, re.compile(r"Torch not compiled with CUDA enabled"), _DEVICE),
    _ErrorExplanation(
        RuntimeError,
        re.compile(r"No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is insuff"),
        _DEVICE,
    ),
    _ErrorExplanation(RuntimeError, re.compile(r"Trying to backward through the graph a second time"), _TWICE),
    # By the text alone, because importing sqlite3 for its error would take every program longer.
    _ErrorExplanation(Exception, re.compile(r"^SQLite objects created in a thread can only be used"), _THREAD),
    _ErrorExplanation(RuntimeError, re.compile(r"element 0 of tensors does not require grad"), _NO_GRADIENT),
)


def explained(error: BaseException | None) -> BaseException | None:
    """Return an error with a remedy, caused by the given error, if the error is of a known kind; else the error itself.

    An error of hydra-tune stays as it is. The given error's traceback changes in place, and begins at the user's first
    frame: the frames above say how a pool runs a unit, and hid the user's own lines. An error without a frame of the user's
    keeps all frames.
    """
    if error is None or isinstance(error, HydraTuneError):
        return error
    first = error.__traceback__
    while first is not None and not is_user_file(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    if first is not None:
        error.__traceback__ = first
    explanation = next(
        (candidate for candidate in _ALL if isinstance(error, candidate.kind) and candidate.text.search(str(error))),
        None,
    )
    if explanation is None:
        return error
    line = user_line(error)
    task_error = TaskError(f"{explanation.told} ({first_line(error)}{f', at {line}' if line else ''})")
    # Set by hand, because a pool stores the error instead of raising it.
    task_error.__cause__ = error
    return task_error
