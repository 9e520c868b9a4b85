"""All errors that hydra-tune raises on purpose.

Each message says what failed, what was expected against what was found (with units), then the remedy. This module knows
nothing of the rest of the package.
"""


class HydraTuneError(Exception):
    """Base of every error raised by hydra-tune."""


class TaskError(HydraTuneError, ValueError):
    """A `TrainTask` that cannot be trained as described."""


class ConfigError(HydraTuneError, ValueError):
    """An option of the executor, a device or the command line that makes no sense."""


class SweepFileError(ConfigError):
    """A sweep file that cannot be used; the message starts with `file:line:column`."""


class CaptureError(HydraTuneError):
    """A model and step that `torch.export` could not capture, or captured wrongly."""


class UnfusableError(HydraTuneError):
    """A trial that cannot be fused with others; the message says why."""


class BudgetError(HydraTuneError):
    """Device or host memory that cannot hold what must be held at once.

    Attributes:
        enough_bytes: a budget of each device that would do; None where that is not known, or not what is short.
    """

    def __init__(self, message: str, *, enough_bytes: int | None = None) -> None:
        super().__init__(message)
        self.enough_bytes = enough_bytes


class OutOfMemoryError(BudgetError):
    """A device that really had no memory left for a unit, though the ledger had: at its repeat, or where it has none."""


class SpillError(HydraTuneError):
    """A file of `spill_dir` that could not be written or read.

    Attributes:
        path: the file.
        errno: what the system says, as in `errno`.
    """

    def __init__(self, message: str, *, path: str, errno: int | None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class FileError(HydraTuneError):
    """A file of results that could not be written, read or understood.

    Attributes:
        path: the file.
        errno: what the system says, as in `errno`; None where it has not refused.
    """

    def __init__(self, message: str, *, path: str, errno: int | None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class LoaderTimeoutError(HydraTuneError, TimeoutError):
    """A data loader that has given no batch for longer than its trial waits; the message says where it hangs."""


class LoaderWorkerError(TaskError):
    """A worker process of a data loader that has ended, killed perhaps, or never began."""


class DeviceLostError(HydraTuneError):
    """A device that fails at all it is asked, with state of a trial that nobody else has."""


class WeightsError(HydraTuneError, ValueError):
    """Weights that are not kept, or do not fit the model that is to have them."""


class CheckpointError(HydraTuneError):
    """A checkpoint that cannot be made, found, read, or used for what is asked."""


class BlockStateError(HydraTuneError):
    """A block of memory in a state that cannot follow the one it was in: a fault of hydra-tune; the message has its story."""


class ScheduleError(HydraTuneError):
    """An event the scheduler cannot accept in its present state; the message carries the job's story."""


class MetricError(HydraTuneError, ValueError):
    """A metric that is asked for but never reported, or is not a number."""


class BadLossError(HydraTuneError, ArithmeticError):
    """A training loss that is NaN or infinite."""
