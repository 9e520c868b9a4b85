"""Decides the fate of unfinished trials when a search ends early: give them up, or leave them for a later search.

A left trial with a checkpoint stays running in the storage, where `resume_study` finds the trial. A left trial without
a checkpoint is put back to waiting, like Optuna's own enqueued trials, with its drawn parameters, and begins anew. Both
continue under their old numbers. `OptimizeDriver` (`driver.py`) calls `leave` when Ctrl-C or SIGTERM ends a search with
a `checkpoint_dir`, and `give_up` at every other early end that leaves trials behind. The thread of `optimize` makes all
calls. Both must go on after a trial that cannot be told or put back, so that the other trials do not seem to run.
"""

from collections.abc import Iterable

from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import Trial, TrialState

from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.search.resume_study import StudyResumer

_logger = get_logger("optuna.hydra_tune")


def give_up(study: Study, trials: Iterable[Trial], error: BaseException) -> list[Trial]:
    """Tell the untold trials of a study as failed, after an error; return the trials that could not be told."""
    # As Optuna does for a trial that Ctrl-C ends; any other error reaches the user with its own traceback.
    interrupt = error if isinstance(error, KeyboardInterrupt) else None
    reason = f"the search was ended by {error!r}" if interrupt is None else repr(interrupt)
    untold = []
    for trial in trials:
        try:
            # A sampler may have raised after the storage took the trial's state.
            if not optuna_internals.stored(study, trial).state.is_finished():
                optuna_internals.tell(study, trial, state=TrialState.FAIL)
                optuna_internals.log_failed(trial, reason, error=interrupt)
                interrupt = None  # log the traceback only once
        except Exception:
            _logger.warning("Trial %d could not be told that it failed.", trial.number, exc_info=True)
            untold.append(trial)
    return untold


def leave(
    study: Study, resuming: StudyResumer, submitted: Iterable[Trial], unsubmitted: Iterable[Trial]
) -> list[Trial]:
    """Leave trials so that a later search resumes them.

    Args:
        study: the study.
        resuming: knows the saved trials.
        submitted: trials that were in the pool, whose jobs are saved or cancelled; last units may still run.
        unsubmitted: trials without a job, such as those only just asked for.

    Returns:
        Trials that stay running in the storage.
    """
    # A trial that cannot be put back stays running, too, and so seems to run.
    running = [trial for trial in submitted if resuming.has_checkpoint(trial.number) or not _waits_again(study, trial)]
    return running + [trial for trial in unsubmitted if not _waits_again(study, trial)]


def _waits_again(study: Study, trial: Trial) -> bool:
    try:
        optuna_internals.wait_again(study, optuna_internals.stored(study, trial))
    except Exception:
        _logger.warning(
            "Trial %d still seems to run: it could not be put back to waiting.", trial.number, exc_info=True
        )
        return False
    return True
