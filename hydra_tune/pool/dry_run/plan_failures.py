"""Errors of tasks that cannot be planned; each error names its task, so that other tasks can still be planned.

`report.py` takes an error from here when a task's plan fails; `executor.py` raises `RehearsalError` when a rehearsal
fails, and `report.py` then plans and rehearses the other tasks again.
"""

from hydra_tune.errors import ConfigError, HydraTuneError, TaskError


class RehearsalError(ConfigError):
    """A trial whose steps cannot be rehearsed, possibly beside other trials with working rehearsals."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


def failure_of(name: str, error: Exception) -> HydraTuneError:
    """Return the error that explains why a trial cannot be planned.

    The error may come from the trial's own code, which a plan runs as training does.
    """
    if isinstance(error, HydraTuneError):
        return error
    failure = TaskError(
        f"{name} cannot be planned: it fails with {type(error).__name__}: {error}; see whether train_plain(task) does so too, "
        "and mend its model, step or data there"
    )
    failure.__cause__ = error
    return failure
