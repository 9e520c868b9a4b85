"""What becomes of the trials of a search that ends before they do: given up, or left for another time.

Left is a trial that has a checkpoint: it stays running in the storage, where `resuming.find_left` finds it. One without waits
there, as Optuna's own enqueued trials do, keeps what was drawn for it, and begins anew. So either goes on under its number.
"""

from collections.abc import Iterable

from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import Trial, TrialState

from hydra_tune import HydraExecutor
from hydra_tune_optuna import private
from hydra_tune_optuna.resuming import saved_as

_logger = get_logger("optuna.hydra_tune")


def give_up(study: Study, trials: Iterable[Trial], error: BaseException) -> None:
    """Tell of trials that they have failed.

    Args:
        study: whose trials.
        trials: those that have not been told.
        error: what has ended the search.
    """
    interrupt = error if isinstance(error, KeyboardInterrupt) else None
    reason = f"the search was ended by {error!r}" if interrupt is None else repr(interrupt)
    for trial in trials:
        try:
            if not private.stored(study, trial).state.is_finished():
                private.tell(study, trial, state=TrialState.FAIL)
                private.log_failed(trial, reason, error=interrupt)
                interrupt = None  # one traceback says where it was
        except Exception:
            _logger.warning("Trial %d could not be told that it failed.", trial.number, exc_info=True)


def leave(study: Study, pool: HydraExecutor, submitted: Iterable[Trial], unsubmitted: Iterable[Trial]) -> None:
    """Leave trials so that a later search goes on with them.

    Args:
        study: whose trials.
        pool: has saved them, and runs them no more.
        submitted: those that were in the pool; one that goes on from a checkpoint has that still.
        unsubmitted: those that were only just asked for.
    """
    for trial in submitted:
        if not pool.has_checkpoint(saved_as(study, trial.number)):
            _leave_unbegun(study, trial)
    for trial in unsubmitted:
        _leave_unbegun(study, trial)


def _leave_unbegun(study: Study, trial: Trial) -> None:
    try:
        private.wait_again(study, private.stored(study, trial))
    except Exception:
        _logger.warning("Trial %d seems to run still: it could not be told to wait.", trial.number, exc_info=True)
