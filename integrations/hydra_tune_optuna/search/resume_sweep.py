"""Resumes a sweep in its own folder: finds the trials to resume, and restores the sampler's random streams.

`resume_study` decides the ownership of running trials. `run_sweep` (`sweep.py`) calls `keep_sampler`, if the sweep has a
folder, and `going_on` once the study is open, before the search begins. `going_on` must claim no trial: the search does
(`StudyResumer.begin`).
"""

from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune.errors import CheckpointError
from hydra_tune_optuna import optuna_internals
from hydra_tune_optuna.search.resume_study import StudyResumer
from hydra_tune_optuna.search.sampler_state import note_draws, restore, state_of

_MARK = "hydra_tune:sweep"
_SAMPLER = "sampler"


def going_on(study: Study, pool: HydraExecutor) -> tuple[frozenset[int], list[int]]:
    """Find the running trials of a study that this sweep resumes.

    Returns:
        The numbers of the trials that resume, or begin anew, under their numbers; and the numbers of the trials that belong,
        or may belong, to another process.
    """
    resuming = StudyResumer(study, pool)
    if not resuming.saves:
        return frozenset(), []
    own_numbers = frozenset(resumable.frozen.number for resumable in resuming.left())
    return own_numbers, [
        frozen.number for frozen in optuna_internals.running(study) if frozen.number not in own_numbers
    ]


def keep_sampler(study: Study, sampler: BaseSampler, seed: int | None, folder: SweepFolder) -> None:
    """Restore a sampler's position in this study, and note the position from now on.

    The sampler keeps its fresh position for a study that was deleted and recreated under its name, and where the noted
    position is of another sampler or another seed.

    Raises:
        CheckpointError: the noted position is damaged.
    """
    identity = {"sampler": type(sampler).__name__, "seed": seed}
    key = f"{_MARK}:{folder.identity}"
    noted_state = folder.noted(_SAMPLER)
    # A recreated study lacks this mark in its storage, while the folder still has the old study's position.
    if optuna_internals.study_attributes(study).get(key) is None:
        optuna_internals.set_study_attribute(study, key, True)
    elif noted_state is not None and {name: noted_state.get(name) for name in identity} == identity:
        try:
            restore(sampler, noted_state["streams"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{str(folder.path / 'sampler.json')!r} is damaged: {error}; remove it") from error

    def note(streams: list[dict[str, Any]]) -> None:
        folder.note(_SAMPLER, identity | {"streams": streams})

    # Noted at once, so that a process killed before its first draw resumes from the same position.
    note(state_of(sampler))
    note_draws(sampler, note)
