"""What becomes of the trials of a search that ends before they do: given up, or left for another time.

Left is a trial that has a checkpoint: it stays running in the storage, where `resuming` finds it. One without waits
there, as Optuna's own enqueued trials do, keeps what was drawn for it, and begins anew. So either goes on under its number.
"""

from collections.abc import Iterable

from optuna.logging import get_logger
from optuna.study import Study
from optuna.trial import Trial, TrialState

from hydra_tune_optuna import private
from hydra_tune_optuna.resuming import Resuming

_logger = get_logger("optuna.hydra_tune")


def give_up(study: Study, trials: Iterable[Trial], error: BaseException) -> list[Trial]:
    """Tell of trials that they have failed.

    Args:
        study: whose trials.
        trials: those that have not been told.
        error: what has ended the search.

    Returns:
        Those that could not be told.
    """
    interrupt = error if isinstance(error, KeyboardInterrupt) else None
    reason = f"the search was ended by {error!r}" if interrupt is None else repr(interrupt)
    lost = []
    for trial in trials:
        try:
            if not private.stored(study, trial).state.is_finished():
                private.tell(study, trial, state=TrialState.FAIL)
                private.log_failed(trial, reason, error=interrupt)
                interrupt = None  # one traceback says where it was
        except Exception:
            _logger.warning("Trial %d could not be told that it failed.", trial.number, exc_info=True)
            lost.append(trial)
    return lost


def leave(study: Study, resuming: Resuming, submitted: Iterable[Trial], unsubmitted: Iterable[Trial]) -> list[Trial]:
    """Leave trials so that a later search goes on with them.

    Args:
        study: whose trials.
        resuming: knows which of them are saved; the pool runs them no more.
        submitted: those that were in the pool; one that goes on from a checkpoint has that still.
        unsubmitted: those that were only just asked for.

    Returns:
        Those that stay running in the storage.
    """
    running = [trial for trial in submitted if resuming.has_checkpoint(trial.number) or not _waits_again(study, trial)]
    return running + [trial for trial in unsubmitted if not _waits_again(study, trial)]


def _waits_again(study: Study, trial: Trial) -> bool:
    try:
        private.wait_again(study, private.stored(study, trial))
    except Exception:
        _logger.warning("Trial %d seems to run still: it could not be told to wait.", trial.number, exc_info=True)
        return False
    return True
