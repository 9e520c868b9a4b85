"""What is said of a task that cannot be planned: by name, and apart from those that can."""

from hydra_tune.errors import ConfigError, HydraTuneError, TaskError


class RehearsedError(ConfigError):
    """A trial whose steps cannot be rehearsed, beside others perhaps that can.

    Attributes:
        name: of the trial.
    """

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


def failure_of(name: str, error: Exception) -> HydraTuneError:
    """Why a trial cannot be planned.

    Args:
        name: of the trial.
        error: what was raised meanwhile, by the trial's own code perhaps, which a plan runs as training does.
    """
    if isinstance(error, HydraTuneError):
        return error
    found = TaskError(
        f"{name} cannot be planned: it fails with {type(error).__name__}: {error}; see whether train_plain(task) does so too, "
        "and mend its model, step or data there"
    )
    found.__cause__ = error
    return found
