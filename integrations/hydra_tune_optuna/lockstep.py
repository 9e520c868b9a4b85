"""Whether a pruner can work in a pool as wide as this: said before anything is wasted.

Trials that advance together end together. A pruner that compares with *completed* trials has nothing to compare with
until the first of them end, and where all trials of a search advance together it never has. This module counts; it
drives nothing.
"""

from dataclasses import dataclass

from optuna.study import Study
from optuna.trial import TrialState

from hydra_tune import HydraExecutor
from hydra_tune_optuna.private import completed_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What to do about a pruner that cannot work, in the words of a program or of a sweep file.

    Args:
        staggered: have the oldest trials go first.
        narrower: have fewer trials in flight; `{}` is how many.
        other: take a pruner that compares running trials.
    """

    staggered: str = 'HydraExecutor(admission="staggered")'
    narrower: str = "HydraExecutor(max_concurrent={})"
    other: str = "SuccessiveHalvingPruner(min_resource=1)"


def num_unjudged(needed: int, abreast: int) -> int:
    """Trials of equal length that have ended before the pruner can judge any.

    Args:
        needed: completed trials that the pruner waits for.
        abreast: trials that advance together.
    """
    return -(-needed // abreast) * abreast


def useless_pruner(
    study: Study,
    executor: HydraExecutor,
    *,
    n_trials: int | None,
    width: int,
    remedies: Remedies | None = None,
    is_fused: bool = False,
) -> str | None:
    """Why the study's pruner cannot end any trial of a search, and what helps; None if it can.

    None also where it could not at any width, and where the number of trials is not known.

    Args:
        study: with the pruner, and the trials that have completed before.
        executor: the pool.
        n_trials: trials of the search.
        width: trials in flight.
        remedies: in whose words.
        is_fused: whether trials are known to be computed together, as many as the executor allows; where they are not known
            to be, fewer may advance together, which leaves a pruner more to compare with.
    """
    needed_in_all = completed_needed(study.pruner)
    if not needed_in_all or n_trials is None or len(study.directions) > 1:
        return None
    earlier = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    needed, abreast = (
        max(0, needed_in_all - earlier),
        min(width, executor.num_abreast if is_fused else executor.num_abreast_alone),
    )
    working = [number for number in range(1, abreast + 1) if num_unjudged(needed, number) < n_trials]
    if not working or abreast in working:
        return None
    words = remedies or Remedies()
    # So few abreast that half of the trials can be judged or, if none is that few, as many as can be at any width.
    narrow = max(number for number in working if num_unjudged(needed, number) <= max(n_trials // 2, needed))
    helping = [words.narrower.format(narrow), words.other]
    if not executor.fusion_size and len(executor.device_names) in working:
        helping.insert(0, words.staggered)
    ended = "has completed" if needed == 1 else "have completed"
    return (
        f"{type(study.pruner).__name__} may prune few or none of {n_trials} trials if they are equally long: {abreast} "
        f"advance together, and it needs {needed} that {ended}; use {', '.join(helping[:-1])}, or {helping[-1]}"
    )
