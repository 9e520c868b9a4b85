"""A sweep that goes on in its own folder: whose trials are whose, and where its sampler was.

The folder is this process's alone, so a running trial that bears its mark is run by nobody. With a checkpoint it goes on from
there (`resuming`); without one it waits, keeps what was drawn for it, and begins anew. A running trial without the mark may be
another process's, and is let be.
"""

from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.errors import CheckpointError
from hydra_tune_optuna import private
from hydra_tune_optuna.resuming import find_left, is_under_way
from hydra_tune_optuna.sampler_state import note_draws, restore, state_of

_MARK = "hydra_tune:sweep"
_SAMPLER = "sampler"


def mark(trial: Trial, folder: SweepFolder) -> None:
    """Note that a trial is of the sweep in this folder."""
    private.mark(trial, _MARK, folder.identity)


def take_back(study: Study, pool: HydraExecutor, folder: SweepFolder | None) -> tuple[int, list[int]]:
    """Have all trials that this sweep has left running go on or wait.

    Args:
        study: whose trials.
        pool: has their checkpoints.
        folder: of the sweep, locked; None: its trials are not saved.

    Returns:
        How many go on from checkpoints, and the numbers of the trials that run and are not this sweep's.
    """
    others: list[int] = []
    if folder is None:
        return 0, others
    left = {found.frozen.number for found in find_left(study, pool)}
    for frozen in private.running(study):
        if frozen.number in left:
            continue
        if _is_mine(frozen, folder) and not is_under_way(study, pool, frozen.number):
            private.wait_again(study, frozen)
        else:
            others.append(frozen.number)
    return len(left), others


def _is_mine(frozen: FrozenTrial, folder: SweepFolder) -> bool:
    return frozen.system_attrs.get(_MARK) == folder.identity


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
