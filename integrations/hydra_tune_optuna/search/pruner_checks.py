"""Checks whether a pruner can work at a pool's width, before any compute is wasted.

Trials that advance together end together. A pruner that compares with *completed* trials has nothing to compare with
until the first trials end; where all trials of a search advance together, such a pruner never ends any. The module
counts trials, and drives nothing. `PoolStudy.optimize` (`pool_study.py`) asks before each search, and `run_sweep`
(`sweep.py`) before each sweep of the command line.
"""

from dataclasses import dataclass

from optuna.study import Study
from optuna.trial import TrialState

from hydra_tune import HydraExecutor
from hydra_tune_optuna.optuna_internals import completed_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunerRemedies:
    """Remedies for a pruner that cannot work, as options of a program or of a sweep file.

    Args:
        staggered: let the oldest trials go first.
        narrower: keep fewer trials in flight; `{}` stands for the number.
        other: use a pruner that compares running trials.
    """

    staggered: str = 'HydraExecutor(admission="staggered")'
    narrower: str = "HydraExecutor(max_concurrent={})"
    other: str = "SuccessiveHalvingPruner(min_resource=1)"


def num_unjudged(needed: int, abreast: int) -> int:
    """Trials of equal length that end before the pruner can judge any trial.

    Args:
        needed: completed trials that the pruner requires.
        abreast: trials that advance together.
    """
    # Trials end in batches of `abreast`: round up to whole batches.
    return -(-needed // abreast) * abreast


def useless_pruner(
    study: Study,
    executor: HydraExecutor,
    *,
    n_trials: int | None,
    width: int,
    remedies: PrunerRemedies | None = None,
    is_fused: bool = False,
) -> str | None:
    """Explain why the study's pruner cannot end any trial of a search, with remedies; None if the pruner can.

    None also for a pruner that is useless at any width, and where the number of trials is not known.

    Args:
        study: has the pruner and the trials completed before.
        executor: the pool.
        n_trials: trials of the search.
        width: trials in flight.
        remedies: wording of the remedies; None: options of a program.
        is_fused: whether trials are known to be fused, up to the executor's limit; otherwise fewer trials may advance
            together, and the pruner has more to compare with.
    """
    needed_in_all = completed_needed(study.pruner)
    if not needed_in_all or n_trials is None or len(study.directions) > 1:
        return None
    # Trials of earlier searches count: the pruner compares with them, too.
    earlier = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    needed, abreast = (
        max(0, needed_in_all - earlier),
        min(width, executor.num_abreast if is_fused else executor.num_abreast_alone),
    )
    working = [number for number in range(1, abreast + 1) if num_unjudged(needed, number) < n_trials]
    # Useless at any number of trials abreast, or useful at this one: there is nothing to advise.
    if not working or abreast in working:
        return None
    words = remedies or PrunerRemedies()
    # The widest setting at which half of the trials can be judged; if none reaches half, the one that judges most.
    narrow = max(number for number in working if num_unjudged(needed, number) <= max(n_trials // 2, needed))
    helping = [words.narrower.format(narrow), words.other]
    # Members of a fused group advance together under either admission.
    if not executor.fusion_size and len(executor.device_names) in working:
        helping.insert(0, words.staggered)
    ended = "has completed" if needed == 1 else "have completed"
    return (
        f"{type(study.pruner).__name__} may prune few or none of {n_trials} trials if they are equally long: {abreast} "
        f"advance together, and it needs {needed} that {ended}; use {', '.join(helping[:-1])}, or {helping[-1]}"
    )
