"""A sweep that goes on in its own folder: how many of its trials go on, and where its sampler was.

Whose a running trial is, `resuming` says.
"""

from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.errors import CheckpointError
from hydra_tune_optuna import private
from hydra_tune_optuna.resuming import Resuming
from hydra_tune_optuna.sampler_state import note_draws, restore, state_of

_MARK = "hydra_tune:sweep"
_SAMPLER = "sampler"


def going_on(study: Study, pool: HydraExecutor) -> tuple[int, list[int]]:
    """Which running trials of a study this sweep goes on with.

    Args:
        study: whose trials.
        pool: has their checkpoints.

    Returns:
        How many go on, or begin anew, under their numbers, and the numbers of those that are, or may be, another process's.
    """
    resuming = Resuming(study, pool)
    if not resuming.saves:
        return 0, []
    left = {found.frozen.number for found in resuming.left()}
    return len(left), [frozen.number for frozen in private.running(study) if frozen.number not in left]


def keep_sampler(study: Study, sampler: BaseSampler, seed: int | None, folder: SweepFolder) -> None:
    """Have a sampler go on where it was in this study, and note where it is from now on.

    A study that was deleted and made again under its name begins anew, and so does another sampler, or one with another seed.

    Args:
        study: that is searched.
        sampler: of a sweep file.
        seed: that it was made with.
        folder: of the sweep.

    Raises:
        CheckpointError: what was noted is damaged.
    """
    of = {"sampler": type(sampler).__name__, "seed": seed}
    key = f"{_MARK}:{folder.identity}"
    noted = folder.noted(_SAMPLER)
    if private.study_attributes(study).get(key) is None:
        private.set_study_attribute(study, key, True)
    elif noted is not None and {name: noted.get(name) for name in of} == of:
        try:
            restore(sampler, noted["streams"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{str(folder.path / 'sampler.json')!r} is damaged: {error}; remove it") from error

    def note(streams: list[dict[str, Any]]) -> None:
        folder.note(_SAMPLER, of | {"streams": streams})

    note(state_of(sampler))
    note_draws(sampler, note)
