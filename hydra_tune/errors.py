"""The errors that hydra-tune raises on purpose for people to see, and helpers that word messages.

A message says what failed, then, where known, expected against found values (with units) and the remedy. All packages
import the module, and the module must not import any of the packages, or torch. People import `HydraTuneError` and
`TrialsFailed` from `hydra_tune`. Elsewhere are `Terminated` (`interrupts.py`), errors that never leave the package, and the
errors of each integration (`errors.py` there). The pool's process sends errors to the program (`isolation/sending.py`), so
every error must survive pickling.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_NUM_CAUSES = 3
_NUM_NUMBERS = 8


class HydraTuneError(Exception):
    """Base of the errors that people see; `LoopEnded` and `Terminated`, which end code in order, have other bases."""


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def message_line(error: object) -> str:
    """Return the first line of an error's message, or the error's class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest of `known`, or an empty text where none is close."""
    lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return f"did you mean {lower[close[0]]!r}?" if close else ""


def with_hint(text: str, name: str, known: Iterable[str]) -> str:
    """Append the hint of `did_you_mean`, if any, to a message."""
    hint = did_you_mean(name, known)
    return f"{text}; {hint}" if hint else text


class TrialsFailed(HydraTuneError):  # noqa: N818 - it tells of trials, several of which may have completed
    """At least one of the trials of `HydraExecutor.run` has failed, and all trials have ended.

    Args:
        results: of all tasks, in their order.

    Attributes:
        results: as given; completed results have their weights.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)
        failed = [(number, result.error) for number, result in enumerate(self.results) if result.status == "failed"]
        causes: dict[str, list[int]] = {}
        for number, error in failed:
            causes.setdefault("no error is known" if error is None else first_line(error), []).append(number)
        lines = [f"{_numbered(numbers)}: {cause}" for cause, numbers in causes.items()]
        num_hidden = len(lines) - _NUM_CAUSES
        more = [f"and {num_hidden} other cause{'s' * (num_hidden > 1)}"] if num_hidden > 0 else []
        super().__init__(
            f"{len(failed)} of {len(self.results)} trials failed ({'; '.join([*lines[:_NUM_CAUSES], *more])}). The log has the "
            "traceback of each, and this error's .results has every trial's result, completed ones included; with "
            "on_error='return' run() returns that list instead of raising"
        )

    # Pickling calls the class with the message by default; rebuild from the results instead.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.results,)


def _numbered(numbers: Sequence[int]) -> str:
    numbers_text = ", ".join(map(str, numbers[:_NUM_NUMBERS])) + ("" if len(numbers) <= _NUM_NUMBERS else ", ...")
    return f"task {numbers_text}" if len(numbers) == 1 else f"tasks {numbers_text}"


class TaskError(HydraTuneError, ValueError):
    """A `TrainTask` that cannot be trained as described."""


class ConfigError(HydraTuneError, ValueError):
    """An option of the executor, a device or the command line that makes no sense."""


class SweepFileError(ConfigError):
    """A sweep file that cannot be used; the message starts with `file:line:column`."""


class CaptureError(HydraTuneError):
    """A model and step that `torch.export` could not capture, or captured wrongly."""


class UnfusableError(HydraTuneError):
    """A trial that cannot be fused with others, or a group's step that cannot be planned; the message says why."""


class GroupBatchError(TaskError):
    """A kind of batch that the trials of a group cannot compute together; each of the trials can go on by itself."""


class BudgetError(HydraTuneError):
    """Device or host memory too small for state that must be resident at once.

    Attributes:
        enough_bytes: a sufficient budget for each device, in bytes; None where not known, or where the shortage lies
            elsewhere.
    """

    def __init__(self, message: str, *, enough_bytes: int | None = None) -> None:
        super().__init__(message)
        self.enough_bytes = enough_bytes


class OutOfMemoryError(BudgetError):
    """A device that ran out of memory in a unit within budget: at the unit's repeat, or at once without a repeat.

    Also a planned step of a group that cannot run as planned (the pool then continues in smaller groups), or a host that ran
    out of memory in an update.
    """


class _PathError(HydraTuneError):
    """Base of errors about a file.

    Attributes:
        path: the file.
        errno: the system's error number, as in `errno`; None where the system has not refused.
    """

    # Defaults, because unpickling makes the error from its message alone, and restores the attributes after.
    def __init__(self, message: str, *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class SpillError(_PathError):
    """A file of `spill_dir` that could not be written or read."""


class FileError(_PathError):
    """A file outside `spill_dir` that could not be written, read or understood."""


class LoaderTimeoutError(HydraTuneError, TimeoutError):
    """A data loader that gave no batch within the trial's time limit; the message says where the loader hangs."""


class LoaderWorkerError(TaskError):
    """A worker process of a data loader that has ended, perhaps killed, or never began."""


class DeviceLostError(HydraTuneError):
    """A lost device: the pool's last device, a device lent to a measurement, or one with the only copy of a trial's state."""


class TrialCrashedError(HydraTuneError):
    """A trial that repeatedly ended the process of the pool, and is not run again.

    Args:
        name: of the trial.
        crashes: how often the trial ended the process.
        how: the way the process ended the last time.

    Attributes:
        name, crashes, how: as given.
    """

    def __init__(self, name: str, crashes: int, how: str) -> None:
        self.name, self.crashes, self.how = name, crashes, how
        super().__init__(
            f"{name} has ended the pool's process {crashes} times while it ran, the last time by {how}, and is not tried "
            "again; the others go on. Train its task alone, by train_plain in python -X faulthandler (on a GPU also with "
            "CUDA_LAUNCH_BLOCKING=1), to see where its code, or a library that this calls, crashes or exits"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # As for `TrialsFailed`: from the arguments, not from the message.
        return type(self), (self.name, self.crashes, self.how)


class WeightsError(HydraTuneError, ValueError):
    """Weights that are not kept, or do not fit the given model."""


class CheckpointError(HydraTuneError):
    """A checkpoint that cannot be made, found, read, or used as asked."""


class BlockStateError(HydraTuneError):
    """An invalid transition of a memory block's state: a bug of hydra-tune; the message has the block's history."""


class ScheduleError(HydraTuneError):
    """An event that the scheduler cannot accept (the message has the job's history), or a policy's choice of no candidate."""


class MetricError(HydraTuneError, ValueError):
    """A metric that is requested but never reported, or is not a number."""


class BadLossError(HydraTuneError, ArithmeticError):
    """A training loss that is NaN or infinite."""


class LoopEnded(BaseException):
    """Raised in a loop of the user's own, at its mark, when its trial is over, e.g. pruned or cancelled; let the error pass.

    No `Exception`, so that a loop's own `except Exception` does not keep the trial from ending.
    """
